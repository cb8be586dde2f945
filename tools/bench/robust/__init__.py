"""Accuracy of robust rules under attacks: 25 workers with unlike data, five of them wrong."""
