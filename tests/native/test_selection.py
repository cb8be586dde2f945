"""Checks that the compiled selection finds the largest values in TensorFlow's order."""

import numpy as np
import pytest
import tensorflow as tf

from tests.compression.test_selection import COUNT, KINDS, LENGTH, numbers
from tfdml import native
from tfdml.compression.codecs import selection


@pytest.mark.parametrize("count", [1, COUNT, LENGTH])
@pytest.mark.parametrize("kind", [*KINDS, "in columns"])
def test_selected_values_are_the_largest(kind, count):
    rows = np.stack([numbers(kind), numbers("normal")])
    values, indices = (t.numpy() for t in native.load().tfdml_largest(tf.constant(rows), count))
    for row, of_row, at in zip(rows, values, indices, strict=True):
        assert of_row.tobytes() == row[at].tobytes()
        assert len(set(at)) == count
        sizes = np.where(np.isfinite(row), np.abs(row), np.inf)
        np.testing.assert_array_equal(np.sort(sizes[at]), np.sort(sizes)[-count:])
        # Of equal values, the first.
        smallest = sizes[at].min()
        equal = np.sort(at[sizes[at] == smallest])
        np.testing.assert_array_equal(equal, np.flatnonzero(sizes == smallest)[: len(equal)])


def test_misleading_sample_does_not_change_the_selection():
    # The sample has 4 of 489 values: those are the largest.
    rng = np.random.default_rng(0)
    row = rng.uniform(0, 0.5, 2_000_000).astype("float32")
    row[np.arange(row.size) % 489 < 4] += 1
    values, _ = native.load().tfdml_largest(row[None], 200_000)
    np.testing.assert_array_equal(np.sort(np.abs(values[0])), np.sort(np.abs(row))[-200_000:])


def test_encoded_bytes_are_identical(monkeypatch):
    rows = tf.constant(np.stack([numbers("normal"), numbers("sorted")]))
    sent = []
    for library in (native.load(), None):
        monkeypatch.setattr(native, "usable", lambda library=library: library)
        sent.append(selection.encoded_largest(rows, COUNT, 2 * COUNT).numpy())
    assert sent[0].tobytes() == sent[1].tobytes()


@pytest.mark.parametrize("count", [0, 9])
def test_wrong_counts_are_refused(count):
    with pytest.raises(tf.errors.InvalidArgumentError, match="`count` must be from 1"):
        native.load().tfdml_largest(tf.zeros([1, 8]), count)
