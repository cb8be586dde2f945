"""Benchmarks of compressed training: speed on slow networks, and loss of accuracy."""
