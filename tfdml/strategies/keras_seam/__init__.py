"""The only package that depends on Keras's internals: the strategies' patches of `fit`."""

from tfdml.strategies.keras_seam.fit.trainer import ReplicaHooks
from tfdml.strategies.keras_seam.seam import install
from tfdml.strategies.keras_seam.step.recomputing import recomputed

__all__ = ["ReplicaHooks", "install", "recomputed"]
