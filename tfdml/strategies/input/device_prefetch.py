"""Prefetching of data to the replicas' devices."""

import collections
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorflow as tf

from tfdml.strategies.input.iterators import open_iterator
from tfdml.strategies.input.local_batch import LocalBatch

# Number of local batches that are copied while a step runs.
AHEAD = 2


class DevicePrefetcher:
    """Iterable of local batches whose rows are already on their replicas' devices.

    A thread reads and copies the next local batches while steps run, so a GPU does not wait for its
    rows. The row counts stay on the CPU: the step branches on them, and would have to wait for the
    GPU to return them. Local batches already read are lost if the iteration is dropped.

    Args:
        dataset: Iterable of local batches with an `element_spec`.
        devices: This process's devices, one per replica.
    """

    def __init__(self, dataset: Any, devices: Sequence[str]):
        self.dataset = dataset
        self._devices = tuple(devices)

    @property
    def element_spec(self) -> Any:
        """The dataset's element spec."""
        return self.dataset.element_spec

    def __iter__(self) -> Iterator[LocalBatch]:
        """Yields the local batches in order; starts the dataset's pass at once, as `iter` does.

        Raises:
            Exception: Whatever the dataset raises, at the position of the failed local batch.
        """
        return self._ahead(open_iterator(self.dataset))

    def _ahead(self, local_batches: Iterator[LocalBatch]) -> Iterator[LocalBatch]:
        copier = ThreadPoolExecutor(1, "tfdml-on-devices")
        try:
            coming = collections.deque(
                copier.submit(self._next, local_batches) for _ in range(AHEAD)
            )
            while (local_batch := coming.popleft().result()) is not None:
                coming.append(copier.submit(self._next, local_batches))
                yield local_batch
        finally:
            copier.shutdown(cancel_futures=True)

    def _next(self, local_batches: Iterator[LocalBatch]) -> LocalBatch | None:
        local_batch = next(local_batches, None)
        if local_batch is None:
            return None
        pairs = zip(local_batch.parts, self._devices, strict=True)
        return local_batch._replace(parts=tuple(_copied(part, device) for part, device in pairs))


def has_accelerators(devices: Iterable[str]) -> bool:
    """Returns whether any device is not a CPU, so that rows must be copied to it."""
    return any(tf.DeviceSpec.from_string(device).device_type != "CPU" for device in devices)


def _copied(part: Any, device: str) -> Any:
    """Returns a replica's rows on its device.

    Strings, ragged and sparse tensors, and int32, which TensorFlow keeps on the CPU for every
    device, are not copied.
    """

    def copied(value: Any) -> Any:
        if not isinstance(value, tf.Tensor) or not _is_copied(value.dtype):
            return value
        with tf.device(device):
            return tf.identity(value)

    return tf.nest.map_structure(copied, part)


def _is_copied(dtype: tf.DType) -> bool:
    if dtype == tf.int32:
        return False
    return dtype.is_floating or dtype.is_integer or dtype.is_complex or dtype.is_bool
