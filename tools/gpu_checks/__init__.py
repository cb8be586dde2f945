"""What `tools/gpu_report` checks on this machine's devices, and the page that it writes."""
