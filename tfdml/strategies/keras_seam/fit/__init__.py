"""Seam to Keras's `fit`, `evaluate` and `predict`: loops, data adapters, callbacks, progress."""
