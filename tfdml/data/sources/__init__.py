"""Inputs that can be converted to records, one kind in each module."""
