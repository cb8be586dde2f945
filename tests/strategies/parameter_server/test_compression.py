"""What workers push, in fewer bytes: on the wire, and what training makes of it."""

import pytest

from tests.strategies.parameter_server import compression_cases as cases


@pytest.mark.parametrize("synchronous", [False, True])
def test_fewer_bytes_are_sent(cluster, synchronous):
    plain = cluster.run(cases.pushed, synchronous, None)
    small = cluster.run(cases.pushed, synchronous, "float16")
    saved = plain["bytes"] - small["bytes"]
    # Half of what workers push of the large layer; weights come to them as they are. A global
    # step of two synchronous workers pushes two gradients, an asynchronous one pushes one.
    assert saved > 0.35 * cases.GRADIENT_BYTES * (2 if synchronous else 1)
    assert abs(small["loss"] - plain["loss"]) < 0.1 * plain["loss"] + 0.02


def test_asynchronous_workers_learn_by_rounded_gradients(cluster):
    result = cluster.run(cases.learned)
    assert result["steps"] == 400
    assert result["last"] < 0.3 * result["first"]


@pytest.mark.parametrize("compression", ["power_sgd", "one_bit", "top_k"])
def test_codecs_that_need_a_memory_are_refused(cluster, compression):
    assert "keep no residual for the next step" in cluster.run(cases.refused, compression)
