"""Measurements of training that callbacks show: times of steps, memory, and use of the hardware."""
