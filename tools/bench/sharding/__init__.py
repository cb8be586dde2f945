"""Benchmark of optimizer state that is divided among the ranks."""
