"""Summation of gradients over a process's devices and over processes."""
