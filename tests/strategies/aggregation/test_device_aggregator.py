"""Checks `MirroredStrategy(compression=...)`, which treats devices like processes."""

import numpy as np
import pytest

import tfdml
from tests.compression import training_cases
from tests.strategies.aggregation import device_aggregator_cases as cases
from tests.strategies.compare import assert_close
from tests.strategies.contract import compiled_cases
from tfdml.compression.exchange.redistribution import states_by_rank


def test_results_of_collective_operations_between_devices(ranks):
    (found,) = ranks(3, "mirrored").run(cases.operations)
    assert found["all_reduce"] == [[30, 33, 36]] * 3
    assert found["all_gather"] == [[0, 1, 1, 2, 2, 2]] * 3
    assert found["all_to_all"] == [[0, 10, 20], [1, 11, 21], [2, 12, 22]]
    assert found["broadcast"] == [[10, 11, 12]] * 3
    assert found["elsewhere"] == []
    # Each device cuts what it sends, and sums one part for all.
    assert found["on"] == dict.fromkeys(("Unpack", "AddN"), ["CPU:0", "CPU:1", "CPU:2"])


@pytest.mark.parametrize(
    "compressor",
    [
        "int8",
        "powersgd",
        *(
            pytest.param(c, marks=pytest.mark.slow)
            for c in ("dgc", "fp16", "onebit", "topk", "randomk")
        ),
    ],
)
def test_devices_train_like_processes(ranks, compressor):
    processes = ranks(2).run(training_cases.train, compressor)
    (devices,) = ranks(2, "mirrored").run(training_cases.train, compressor)
    assert_close(processes[0], devices, rtol=1e-4, atol=1e-5)


def test_gradients_are_compressed(ranks):
    plain, lossy = (ranks(2, "mirrored").run(training_cases.train, c)[0] for c in (None, "int4"))
    with pytest.raises(AssertionError):
        assert_close(plain["weights"], lossy["weights"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("size", "compressor"), [(1, "int4"), (2, "auto"), (2, "identity")])
def test_options_without_effect(ranks, size, compressor):
    """One device sends nothing; without a network no codec pays off."""
    (plain,) = ranks(size, "mirrored").run(training_cases.train, None)
    (other,) = ranks(size, "mirrored").run(training_cases.train, compressor)
    assert_close(plain, other, rtol=0, atol=0)


def test_embeddings_stay_sparse(ranks):
    everything = tfdml.compression.DeepGradientCompression(1.0, masking=False)
    (plain,) = ranks(1).run(training_cases.embed, None)
    (devices,) = ranks(2, "mirrored").run(training_cases.embed, everything)
    assert_close(plain["weights"], devices["weights"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("compressor", ["int4", "powersgd"])
def test_overflow_on_one_device_reaches_all(ranks, compressor):
    case = (training_cases.train, compressor, "mixed_float16", 1, None, 2)
    (result,) = ranks(2, "mirrored").run(*case)
    assert result["iterations"] == 2
    assert result["unchanged"]
    assert all(result["unchanged"])
    assert all(result["weights_kept"])


@pytest.mark.parametrize("accumulate", [2])
def test_gradients_of_several_steps(ranks, accumulate):
    case = (training_cases.train, "int8", "float32", 1, accumulate)
    (devices,) = ranks(2, "mirrored").run(*case)
    assert_close(ranks(2).run(*case)[0], devices, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_compiled(ranks):
    processes = ranks(2).run(compiled_cases.compressed, "int8")
    (devices,) = ranks(2, "mirrored").run(compiled_cases.compressed, "int8")
    assert_close(processes[0], devices, rtol=1e-4, atol=1e-5)


def test_state_moves_from_devices_to_processes_and_back(ranks):
    codec = tfdml.compression.QSGD(4)
    (first,) = ranks(2, "mirrored").run(cases.state_after, codec, None)
    state = first["state"]
    assert {"device_0/residual/kernel", "device_1/residual/kernel"} <= state.keys()
    assert all(
        device == f"CPU:{name[len('device_')]}" for name, device in first["placement"].items()
    )
    # Processes, and devices, that resume from it send the devices' residuals.
    here = ranks(2).run(cases.state_after, codec, [state])
    (there,) = ranks(2, "mirrored").run(cases.state_after, codec, [state])
    assert np.abs(here[0]["sums"][0]).max() > 0
    np.testing.assert_array_equal(here[0]["sums"][0], there["sums"][0])
    (back,) = ranks(2, "mirrored").run(cases.state_after, codec, [h["state"] for h in here])
    (on,) = ranks(2, "mirrored").run(cases.state_after, codec, [there["state"]])
    np.testing.assert_array_equal(back["sums"][1], on["sums"][1])


def test_ranks_are_processes_or_devices():
    devices = {"device_1/a": 1, "device_0/a": 0, "device_10/a": 10, "gathered/0/0": 5}
    assert states_by_rank([devices]) == [{"a": 0}, {"a": 1}, {"a": 10}]
    assert states_by_rank([{"a": 1}, {"a": 2}]) == [{"a": 1}, {"a": 2}]
