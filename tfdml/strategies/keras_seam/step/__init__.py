"""Seam to Keras within a step: losses, gradients, optimizers, layers and compilation."""
