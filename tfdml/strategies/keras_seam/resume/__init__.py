"""Seam to Keras for training that continues from a saved position."""
