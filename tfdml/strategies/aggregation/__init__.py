"""Aggregation of a step's gradients over a process's devices and the processes."""
