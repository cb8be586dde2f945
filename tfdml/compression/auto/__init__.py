"""Automatic choice of a codec from measured costs."""
