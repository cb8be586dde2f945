"""The one room that knows Keras's insides: where the strategies enter `fit`."""

from tfdml.strategies.keras_seam.seam import SUPPORTED_KERAS, install

__all__ = ["SUPPORTED_KERAS", "install"]
