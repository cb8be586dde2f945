"""Seam to Keras's data adapters: what `fit` reads, and the position in it that checkpoints keep."""
