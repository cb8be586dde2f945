"""Compressed training on slow networks, and what compression costs in accuracy."""
