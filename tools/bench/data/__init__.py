"""Benchmarks of input pipelines and conversions against other libraries."""
