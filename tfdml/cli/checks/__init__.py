"""Checks of `tfdml doctor`: functions that return findings, one subject per module."""
