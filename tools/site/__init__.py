"""Builds the documentation site: `tools/docs`."""
