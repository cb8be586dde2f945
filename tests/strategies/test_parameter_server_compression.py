"""What workers push, in fewer bytes: on the wire, and what training makes of it."""

import pytest

from tests.strategies import parameter_server_compression as cases


def test_fewer_bytes_are_sent(cluster):
    plain = cluster.run(cases.pushed, None)
    small = cluster.run(cases.pushed, "float16")
    saved = plain["bytes"] - small["bytes"]
    # Half of what two workers push of the large layer; weights come to them as they are.
    assert saved > 0.35 * cases.GRADIENT_BYTES * 2
    assert abs(small["loss"] - plain["loss"]) < 0.1 * plain["loss"] + 0.02


def test_asynchronous_workers_push_as_it_is(cluster):
    words = "`compression` must be None without `synchronous=True`"
    assert words in cluster.run(cases.refused, "float16", False)


@pytest.mark.parametrize("compression", ["power_sgd", "one_bit", "top_k"])
def test_codecs_that_need_a_memory_are_refused(cluster, compression):
    assert "nothing that a step leaves out is kept" in cluster.run(cases.refused, compression)
