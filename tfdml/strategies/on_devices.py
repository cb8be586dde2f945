"""Data that are on their replicas' devices before the step asks for them."""

import collections
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorflow as tf

from tfdml.strategies.iteration import opened
from tfdml.strategies.share import Portion

# Portions that are copied while a step runs.
AHEAD = 2


class OnDevices:
    """Portions of global batches whose rows have been copied to their replicas' devices.

    A thread reads the next ones and copies them while steps run, so a GPU does not wait for its
    rows. How many rows there are stays with the processor: the step decides by it what to do, and
    would wait for a GPU to tell. What has been read is lost if the iteration is dropped.

    Args:
        dataset: An iterable of portions, with an `element_spec`.
        devices: This process's devices, one a replica.
    """

    def __init__(self, dataset: Any, devices: Sequence[str]):
        self.dataset = dataset
        self._devices = tuple(devices)

    @property
    def element_spec(self) -> Any:
        """The dataset's."""
        return self.dataset.element_spec

    def __iter__(self) -> Iterator[Portion]:
        """Yields the portions in their order; begins the dataset's pass at once, as that would.

        Raises:
            Exception: What the dataset raises, in the place of a portion.
        """
        return self._ahead(opened(self.dataset))

    def _ahead(self, portions: Iterator[Portion]) -> Iterator[Portion]:
        copier = ThreadPoolExecutor(1, "tfdml-on-devices")
        try:
            coming = collections.deque(copier.submit(self._next, portions) for _ in range(AHEAD))
            while (portion := coming.popleft().result()) is not None:
                coming.append(copier.submit(self._next, portions))
                yield portion
        finally:
            copier.shutdown(cancel_futures=True)

    def _next(self, portions: Iterator[Portion]) -> Portion | None:
        portion = next(portions, None)
        if portion is None:
            return None
        pairs = zip(portion.parts, self._devices, strict=True)
        return portion._replace(parts=tuple(_copied(part, device) for part, device in pairs))


def has_accelerators(devices: Iterable[str]) -> bool:
    """Returns whether one of the devices is no processor, so that rows must be copied to it."""
    return any(tf.DeviceSpec.from_string(device).device_type != "CPU" for device in devices)


def _copied(part: Any, device: str) -> Any:
    """Returns the rows of a replica, on its device.

    Text stays where it is, and whole numbers of 32 bits, which TensorFlow keeps with the processor
    on every device; so does what is ragged or sparse.
    """

    def copied(value: Any) -> Any:
        if not isinstance(value, tf.Tensor) or not _goes(value.dtype):
            return value
        with tf.device(device):
            return tf.identity(value)

    return tf.nest.map_structure(copied, part)


def _goes(dtype: tf.DType) -> bool:
    if dtype == tf.int32:
        return False
    return dtype.is_floating or dtype.is_integer or dtype.is_complex or dtype.is_bool
