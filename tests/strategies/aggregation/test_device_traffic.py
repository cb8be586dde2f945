"""Checks that a process's devices share the work of summing: none receives everything."""

import pytest

from tests.strategies.aggregation import device_traffic_cases as cases
from tests.strategies.compare import assert_close, assert_same_bits
from tfdml.compression import QSGD, PowerSGD

EQUAL = {"rtol": 1e-5, "atol": 2e-6}


@pytest.mark.parametrize("devices", [2, 4])
def test_each_device_receives_and_sends_its_part(ranks, devices):
    """2(L-1)/L of the gradients, where a single summing device would receive L-1 times as much."""
    (found,) = ranks(devices, "mirrored").run(cases.of_a_step, devices, False)
    assert found["nowhere"] == []
    part = 2 * (devices - 1) * cases.GRADIENT_BYTES // devices
    devices = {f"CPU:{i}" for i in range(devices)}
    assert found["received"] == found["sent"] == dict.fromkeys(devices, part)


@pytest.mark.parametrize(
    ("kind", "compression"),
    [
        ("multi_worker", None),
        ("multi_worker", QSGD(8)),
        pytest.param("horovod", None, marks=pytest.mark.slow),
        pytest.param("horovod", PowerSGD(2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_each_device_exchanges_with_its_peers(ranks, kind, compression):
    for found in ranks(2, kind).run(cases.of_a_step, 2, False, compression):
        assert found["nowhere"] == []
        one = cases.GRADIENT_BYTES
        assert found["received"] == found["sent"] == {"CPU:0": one, "CPU:1": one}
        if kind == "multi_worker" and compression is None:
            # Plus a few values of the metrics.
            assert one // 2 <= found["exchanged"]["CPU:1"] < 1.01 * one // 2


@pytest.mark.parametrize(("size", "kind"), [(4, "mirrored"), (2, "multi_worker")])
def test_a_group_of_all_devices_exchanges_without_copies(ranks, size, kind):
    """As on GPUs: every device is a member, and the ring or NCCL moves all data."""
    devices = 2 if kind == "multi_worker" else size
    for found in ranks(size, kind).run(cases.of_a_step, devices, True):
        assert found["received"] == {}
        for number in range(devices):
            exchanged = found["exchanged"][f"CPU:{number}"]
            assert cases.GRADIENT_BYTES <= exchanged < 1.01 * cases.GRADIENT_BYTES


@pytest.mark.parametrize("as_group", [False, True], ids=["shared", "group"])
@pytest.mark.parametrize("eagerly", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_results_equal_one_device(ranks, as_group, eagerly):
    (one,) = ranks(1, "mirrored").run(cases.trained, 1, False)
    (four,) = ranks(4, "mirrored").run(cases.trained, 4, as_group, eagerly)
    assert four["identical"]
    assert_close(one, four, **EQUAL)
    workers = ranks(2, "multi_worker").run(cases.trained, 2, as_group, eagerly)
    assert_same_bits(workers)
    assert all(w["identical"] for w in workers)
    assert_close(one, workers[0], **EQUAL)


def test_state_does_not_depend_on_the_devices(ranks):
    """So a checkpoint of processes with one device can be resumed with two."""
    one, two = (ranks(2).run(cases.state_shapes, devices) for devices in (1, 2))
    assert any(name.startswith("server_residual/") for name in one[0])
    assert one == two
