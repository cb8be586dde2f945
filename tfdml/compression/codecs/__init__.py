"""Codecs: one compression algorithm a file."""
