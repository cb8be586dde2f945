"""Checks of TFRecord shards: verification, inspection and diagnosis of speed."""
