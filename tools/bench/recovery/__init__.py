"""Benchmark of the time from the loss of a rank until the others resume training."""
