"""Checks training with compressed gradients on real ranks."""

import numpy as np
import pytest

from tests.compression import training_cases as cases
from tests.compression.test_compressed_aggregator import COMPRESSORS
from tests.strategies.compare import assert_close, assert_same_bits
from tfdml import compression


@pytest.mark.parametrize(
    ("kind", "size", "compressor"),
    [
        ("horovod", 2, "powersgd"),
        pytest.param("horovod", 3, "int4", marks=pytest.mark.slow),
        ("multi_worker", 2, "int8"),
        pytest.param("horovod", 3, "fp16", marks=pytest.mark.slow),
        pytest.param("multi_worker", 2, "powersgd", marks=pytest.mark.slow),
    ],
)
def test_training_is_bit_identical_on_all_ranks_and_converges(ranks, kind, size, compressor):
    (plain,) = ranks.run_sizes((1,), cases.train, None)[1]
    results = ranks(size, kind).run(cases.train, compressor)
    assert_same_bits(results)
    loss, wanted = results[0]["history"]["loss"], plain["history"]["loss"]
    assert loss[-1] < 0.9 * loss[0]
    np.testing.assert_allclose(loss, wanted, rtol=0.05)
    # It was compressed: otherwise the weights would equal those of one process.
    with pytest.raises(AssertionError):
        assert_close(plain["weights"], results[0]["weights"], rtol=1e-5, atol=1e-6, where="")


@pytest.mark.parametrize(
    ("kind", "compressor"),
    [
        ("horovod", compression.DeepGradientCompression(0.1)),
        ("horovod", compression.OneBit()),
        pytest.param("horovod", compression.PowerSGD(2), marks=pytest.mark.slow),
        pytest.param("multi_worker", compression.TopK(0.1), marks=pytest.mark.slow),
    ],
)
def test_kernels_of_layers_on_sequences_are_compressed(ranks, kind, compressor):
    results = ranks(2, kind).run(cases.train_on_sequences, compressor)
    assert_same_bits(results)
    for layer in ("below", "above"):
        assert any(f"{layer}/kernel" in name for name in results[0]["kept"]), results[0]["kept"]
    loss = results[0]["history"]["loss"]
    assert loss[-1] < loss[0]


@pytest.mark.parametrize(
    ("kind", "nesterov", "devices"),
    [
        ("horovod", False, 1),
        pytest.param("horovod", True, 1, marks=pytest.mark.slow),
        pytest.param("horovod", False, 2, marks=pytest.mark.slow),
        pytest.param("multi_worker", False, 1, marks=pytest.mark.slow),
    ],
)
def test_momentum_of_numbers_that_were_not_sent_waits(ranks, kind, nesterov, devices):
    results = ranks(2, kind).run(cases.moved_by_a_step, compression.RandomK(0.1), nesterov, devices)
    assert_same_bits(results)
    weights, slots = results[0]["weights"], results[0]["slots"]
    for index, name in enumerate(("kernel", "bias", "last kernel", "last bias")):
        np.testing.assert_array_equal(weights[index], slots[index], err_msg=name)
    kernel, bias, last, _ = weights
    # Numbers below 1e-8 of a weight's size do not move it.
    assert 0.09 < kernel.mean() <= 0.1
    assert 0.09 < last.mean() <= 0.1
    assert bias.mean() > 0.9, "It is not compressed."


@pytest.mark.slow  # The default tests use simulated ranks.
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("compressor", [*COMPRESSORS, compression.Auto()], ids=repr)
def test_weights_are_bit_identical_after_every_step(ranks, compressor, size):
    first, *others = ranks(size).run(cases.weights_after_each_step, compressor)
    assert len(set(first)) == 3
    for other in others:
        assert other == first


@pytest.mark.slow
@pytest.mark.parametrize("compressor", [None, "int4"])
def test_three_ranks_give_the_same_bits_each_time(ranks, compressor):
    digests = [
        [w.tobytes() for w in ranks(3, hosts=2).run(cases.train, compressor)[0]["weights"]]
        for _ in range(5)
    ]
    assert all(digest == digests[0] for digest in digests)


def test_identity_codec_changes_nothing(ranks):
    plain = ranks(2).run(cases.train, None)
    for a, b in zip(plain, ranks(2).run(cases.train, "identity"), strict=True):
        for one, other in zip(a["weights"], b["weights"], strict=True):
            assert one.tobytes() == other.tobytes()


def test_one_process_compresses_nothing(ranks):
    (plain,) = ranks.run_sizes((1,), cases.train, None)[1]
    (compressed,) = ranks(1).run(cases.train, "powersgd")
    assert_close(plain, compressed, rtol=0, atol=0, where="")


@pytest.mark.parametrize(
    "options", [{"devices": 2}, pytest.param({"accumulate": 2}, marks=pytest.mark.slow)]
)
def test_with_devices_and_with_accumulation(ranks, options):
    (plain,) = ranks(1).run(cases.train, None, "float32", 1, options.get("accumulate"))
    results = ranks(2).run(
        cases.train, "int8", "float32", options.get("devices", 1), options.get("accumulate")
    )
    assert_same_bits(results)
    np.testing.assert_allclose(results[0]["history"]["loss"], plain["history"]["loss"], rtol=0.05)


@pytest.mark.parametrize("devices", [1, 2])
def test_momentum_before_the_exchange_covers_embeddings(ranks, devices):
    (plain,) = ranks(1).run(cases.embed, None)
    everything = compression.DeepGradientCompression(1.0, masking=False)
    results = ranks(2).run(cases.embed, everything, devices)
    assert_same_bits(results)
    assert_close(plain["weights"], results[0]["weights"], rtol=1e-4, atol=1e-5, where="")


@pytest.mark.parametrize(
    "compressor", ["int4", "powersgd", pytest.param("fp16", marks=pytest.mark.slow)]
)
def test_overflow_on_one_rank_passes_the_codec(ranks, compressor):
    for result in ranks(2).run(cases.train, compressor, "mixed_float16", 1, None, 2):
        assert result["iterations"] == 2
        assert all(result["unchanged"])
        assert all(result["weights_kept"])
