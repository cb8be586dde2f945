"""Comparison of a script's training on one process and on several: `tfdml verify`."""
