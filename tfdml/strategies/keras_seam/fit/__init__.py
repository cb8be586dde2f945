"""Seam to Keras's `fit`, `evaluate` and `predict`: loops, callbacks, progress, resuming."""
