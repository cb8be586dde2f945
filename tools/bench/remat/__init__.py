"""Benchmark of gradient checkpointing, see `__main__`."""
