"""The one room that knows Keras's insides: where the strategies enter `fit`."""

from tfdml.strategies.keras_seam.seam import install
from tfdml.strategies.keras_seam.trainer import ReplicaHooks

__all__ = ["ReplicaHooks", "install"]
