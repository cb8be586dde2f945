"""Iteration over datasets whose iterators do not wait for `tf.data`'s autotuner when they end."""

import threading
import weakref
from collections.abc import Iterable, Iterator

import tensorflow as tf


def open_iterator(dataset: Iterable) -> Iterator:
    """Returns an iterator over a dataset whose resources a separate thread frees.

    The autotuner of a `tf.data` iterator sleeps for up to a minute at a time and sometimes misses
    the signal to stop; freeing the iterator waits for it. With TensorFlow 2.21, five of 60
    iterators took 11 to 60 seconds to free after 30 seconds of use, and ten took 52 to 60 seconds
    after 90. In a job, all ranks wait for the rank whose epoch ends late.

    Args:
        dataset: A dataset, or another iterable, whose iterator is returned unchanged.
    """
    iterator = iter(dataset)
    if isinstance(iterator, tf.data.Iterator):
        # The attributes, and the TensorFlow resources in them, outlive the iterator. They are first
        # copied into a separate dict: Python 3.13.0 stores attributes inline in the object, and
        # crashes if the object's first `__dict__` outlives it.
        held = dict(vars(iterator))
        iterator.__dict__ = held
        # Not at interpreter exit, when no thread can be started.
        weakref.finalize(iterator, _free, held).atexit = False
    return iterator


def _free(held: dict) -> None:
    # Not a daemon: interpreter exit must not free what a TensorFlow thread still uses.
    threading.Thread(target=held.clear, name="tfdml-free-iterator").start()


class Reiterable:
    """Iterable whose every pass over a dataset is started by `open_iterator`.

    Args:
        dataset: The dataset or iterable.
    """

    def __init__(self, dataset: Iterable):
        self._dataset = dataset

    def __iter__(self) -> Iterator:
        """Starts a pass."""
        return open_iterator(self._dataset)
