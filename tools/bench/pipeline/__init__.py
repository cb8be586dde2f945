"""Benchmark of pipelines, see `__main__`."""
