"""C++ operations for CPUs: the same results as TensorFlow's, in one pass over memory."""

from tfdml.native.library import load, usable

__all__ = ["load", "usable"]
