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


@pytest.mark.parametrize("decode", [selection.decoded_rows, selection.decoded_sum])
@pytest.mark.parametrize("rows", [1, 3])
def test_decoded_values_are_identical(monkeypatch, decode, rows):
    # Rows share places, and a row has -0.0, infinity and a value that is not a number.
    values = np.stack([numbers("normal") * 10.0**i for i in range(rows)])
    values[0, :3] = -0.0, np.inf, np.nan
    payload = selection.encoded_largest(tf.constant(values), LENGTH // 2, LENGTH // 2)
    found = []
    for library in (native.load(), None):
        monkeypatch.setattr(native, "usable", lambda library=library: library)
        traced = tf.function(lambda p: decode(p, LENGTH)).get_concrete_function(payload)
        assert traced.outputs[0].shape == ([LENGTH] if "sum" in decode.__name__ else [rows, LENGTH])
        found.append(traced(payload).numpy())
    assert np.isfinite(found[0]).sum() < found[0].size
    assert found[0].tobytes() == found[1].tobytes()


@pytest.mark.parametrize("place", [-1, 8])
def test_a_place_outside_of_its_row_is_refused(place):
    payload = np.frombuffer(np.float32(1).tobytes() + np.int32(place).tobytes(), np.uint8)[None]
    for total in (False, True):
        with pytest.raises(tf.errors.InvalidArgumentError, match="A place is outside of its row"):
            native.load().tfdml_spread(payload, 8, sum=total)


def test_a_payload_of_another_size_is_refused():
    with pytest.raises(tf.errors.InvalidArgumentError, match="must have 8 bytes a number"):
        native.load().tfdml_spread(np.zeros([1, 9], np.uint8), 8, sum=True)


@pytest.mark.parametrize("count", [0, 9])
def test_wrong_counts_are_refused(count):
    with pytest.raises(tf.errors.InvalidArgumentError, match="`count` must be from 1"):
        native.load().tfdml_largest(tf.zeros([1, 8]), count)
