"""Checks of `tools/gpu_report` on this machine's devices, and its page."""
