"""Pipelines and conversions beside those of other libraries."""
