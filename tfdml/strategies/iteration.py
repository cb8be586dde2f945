"""Passes over a dataset, at whose end nobody waits for `tf.data`'s autotuner."""

import threading
import weakref
from collections.abc import Iterable, Iterator

import tensorflow as tf


def opened(dataset: Iterable) -> Iterator:
    """Returns an iterator over a dataset; what it holds is freed by a thread of its own.

    The autotuner of a `tf.data` iterator sleeps for up to a minute at a time, and sometimes misses
    that it is to end; who frees the iterator waits for it. With TensorFlow 2.21 five of 60
    iterators took 11 to 60 seconds to free after 30 seconds' use, and ten took 52 to 60 after 90.
    In a job all ranks wait for the one whose epoch ends late.

    Args:
        dataset: A dataset, or another iterable, whose iterator is returned as it is.
    """
    iterator = iter(dataset)
    if isinstance(iterator, tf.data.Iterator):
        # Its attributes outlive the iterator, and with them what TensorFlow holds for it. They are
        # put into a dict of their own first: Python 3.13.0 keeps an object's attributes within the
        # object, and crashes where the object's first `__dict__` outlives it.
        held = dict(vars(iterator))
        iterator.__dict__ = held
        # Not at the program's end: no thread can begin then.
        weakref.finalize(iterator, _free, held).atexit = False
    return iterator


def _free(held: dict) -> None:
    # No daemon: the program's end must not take away what a thread in TensorFlow still uses.
    threading.Thread(target=held.clear, name="tfdml-free-iterator").start()


class Passes:
    """Passes over a dataset, each by `opened`.

    Args:
        dataset: What is iterated over.
    """

    def __init__(self, dataset: Iterable):
        self._dataset = dataset

    def __iter__(self) -> Iterator:
        """Begins a pass."""
        return opened(self._dataset)
