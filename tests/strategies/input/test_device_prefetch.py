"""Checks rows prefetched to the devices: they are there in time, and unchanged."""

import numpy as np
import pytest

from tests.strategies.input import device_prefetch_cases as cases


def test_rows_are_on_their_device_and_row_counts_on_the_host(ranks):
    for result in ranks(2).run(cases.where):
        assert result["local batches"] == 3
        for devices, name in zip(result["parts"], result["devices"], strict=True):
            assert len(devices) == 1
            assert devices.pop().endswith(name.rpartition("/")[2])
        for staying in (result["rows"], result["text"]):
            assert {device.rpartition("/")[2] for device in staying} == {"device:CPU:0"}
        # Batches of 4, 4 and 1 row over four replicas; a replica without a row gets a padded one.
        at = result["replicas"]
        assert result["y"] == [[at[0]], [at[1]], [at[0] + 4], [at[1] + 4], [8], [8]]


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("arrays", {}),
        pytest.param("dataset", {}, marks=pytest.mark.slow),
        pytest.param("dataset", {"steps_per_execution": 2}, marks=pytest.mark.slow),
        ("dataset", {"steps_per_epoch": 2}),
        ("unknown length", {}),
    ],
)
@pytest.mark.parametrize(("kind", "size", "devices"), [("horovod", 2, 2), ("mirrored", 2, 2)])
def test_training_is_the_same(ranks, kind, size, devices, source, options):
    job = ranks(size, kind)
    plain = job.run(cases.trained, source, False, devices, dict(options))
    ahead = job.run(cases.trained, source, True, devices, dict(options))
    for before, after in zip(plain, ahead, strict=True):
        assert before["iterations"] == after["iterations"] > 0
        assert before["read"] == 0
        # Not data agreed on per batch: only the main thread waits for other processes.
        agreed = source == "unknown length" and kind == "horovod"
        assert after["read"] >= after["iterations"] if not agreed else after["read"] == 0
        for a, b in zip(before["weights"], after["weights"], strict=True):
            assert a.tobytes() == b.tobytes()
        for name, values in before["history"].items():
            np.testing.assert_array_equal(values, after["history"][name])


def test_arrays_stay_on_the_host(ranks):
    """A GPU has room for batches, not for all data; here the second CPU stands in for it."""
    for found in ranks(2).run(cases.devices_of_arrays):
        assert len(found) >= 2
        assert {device.rpartition("/")[2] for device in found} == {"device:CPU:0"}


def test_errors_of_the_data_are_raised(ranks):
    for message in ranks(2).run(cases.failing, True):
        assert "assertion failed" in message


def test_no_thread_is_left_of_an_interrupted_epoch(ranks):
    assert ranks(2).run(cases.left_in_the_middle) == [0, 0]
