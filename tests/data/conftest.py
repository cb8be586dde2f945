"""Helpers of the data tests: small data sets, and functions that read them."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tfdml.data import write_tfrecords
from tfdml.data.format.manifest import DatasetManifest


def records(count: int) -> Iterator[dict]:
    for i in range(count):
        yield {"id": i, "x": np.full(3, i, np.float32), "y": i % 4, "text": f"row {i}" * (i % 7)}


@pytest.fixture
def dataset(tmp_path) -> Callable[..., DatasetManifest]:
    """Returns a function that writes a small data set."""

    def make(count: int = 100, shards: int = 3, **options) -> DatasetManifest:
        return write_tfrecords(records(count), str(tmp_path / "set"), shards=shards, **options)

    return make
