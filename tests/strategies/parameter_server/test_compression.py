"""Checks compressed pushes of workers: bytes on the wire, and training results."""

import pytest

from tests.strategies.parameter_server import compression_cases as cases


@pytest.mark.parametrize(
    ("synchronous", "sequences"),
    [
        (False, False),
        (True, False),
        pytest.param(False, True, marks=pytest.mark.slow),
        pytest.param(True, True, marks=pytest.mark.slow),
    ],
)
def test_fewer_bytes_are_sent(cluster, synchronous, sequences):
    plain = cluster.run(cases.pushed, synchronous, None, sequences)
    small = cluster.run(cases.pushed, synchronous, "float16", sequences)
    saved = plain["bytes"] - small["bytes"]
    # Half of the large layer's gradients pushed by workers; weights are sent uncompressed. A global
    # step of two synchronous workers pushes two gradients, an asynchronous step pushes one.
    assert saved > 0.35 * cases.GRADIENT_BYTES * (2 if synchronous else 1)
    assert abs(small["loss"] - plain["loss"]) < 0.1 * plain["loss"] + 0.02


def test_asynchronous_workers_train_with_rounded_gradients(cluster):
    result = cluster.run(cases.learned)
    assert result["steps"] == 400
    assert result["last"] < 0.3 * result["first"]


@pytest.mark.parametrize("compression", ["power_sgd", "one_bit", "top_k"])
def test_codecs_with_residuals_are_refused(cluster, compression):
    assert "keep no residual for the next step" in cluster.run(cases.refused, compression)
