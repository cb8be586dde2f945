"""The only package that depends on Keras's internals: the strategies' patches of `fit`."""

from tfdml.strategies.keras_seam.seam import install
from tfdml.strategies.keras_seam.trainer import ReplicaHooks

__all__ = ["ReplicaHooks", "install"]
