"""Fault-tolerant checkpoints of `fit`: when to save, what is saved, and resuming."""
