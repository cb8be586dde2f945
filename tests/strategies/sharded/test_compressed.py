"""Checks training with divided optimizer state and compressed gradients."""

from typing import Any

import numpy as np
import pytest

from tests.strategies.sharded import cases
from tfdml.compression import TopK

CODECS = ("fp16", "int8", "onebit", "topk", "auto")


def _trained(codec: str | None, way: str | None = None) -> dict[str, Any]:
    # By default it sends too few values to train much in ten steps.
    compression = TopK(0.25) if codec == "topk" else codec
    options = cases.WAYS[way] if way else {}
    return cases.trained("adam", True, strategy_options={"compression": compression}, **options)


def _assert_close_to_uncompressed(plain: dict, results: list[dict]) -> None:
    """Asserts that all ranks have the same bits, and losses near those without compression."""
    for result in results:
        for a, b in zip(results[0]["weights"], result["weights"], strict=True):
            assert a.tobytes() == b.tobytes()
        assert np.allclose(plain["history"]["loss"], result["history"]["loss"], rtol=0.05)
    assert results[0]["bytes"] < 0.6 * sum(r["bytes"] for r in results)


@pytest.mark.parametrize(
    "codec", ["int8", *(pytest.param(c, marks=pytest.mark.slow) for c in CODECS if c != "int8")]
)
@pytest.mark.parametrize("kind", ["horovod", pytest.param("multi_worker", marks=pytest.mark.slow)])
def test_ranks_agree_and_are_near_training_without_compression(ranks, codec, kind):
    plain = ranks(2, kind).run(_trained, None)[0]
    results = ranks(2, kind).run(_trained, codec)
    _assert_close_to_uncompressed(plain, results)
    if codec != "auto":  # It may choose no compression.
        pairs = zip(plain["weights"], results[0]["weights"], strict=True)
        assert any((a != b).any() for a, b in pairs), "Nothing was compressed."


@pytest.mark.slow
@pytest.mark.parametrize("way", cases.WAYS)
def test_ways_to_train_are_near_training_without_compression(ranks, way):
    plain = ranks(2).run(_trained, None, way)[0]
    _assert_close_to_uncompressed(plain, ranks(2).run(_trained, "int8", way))


@pytest.mark.slow
@pytest.mark.parametrize("after", [2, 3])
def test_a_checkpoint_holds_the_residuals(ranks, tmp_path, after):
    arguments = ("sgd", True, False, {"compression": "int8"})
    whole = ranks(2).run(cases.resumed, str(tmp_path / "whole"), 2, *arguments)[0]
    ranks(2).run(cases.resumed, str(tmp_path / "parts"), 1, *arguments)
    for result in ranks(after).run(cases.resumed, str(tmp_path / "parts"), 2, *arguments):
        if after == 2:
            for a, b in zip(whole["weights"], result["weights"], strict=True):
                assert a.tobytes() == b.tobytes()
        # Three ranks draw other masks of Dropout.
        assert np.allclose(whole["history"]["loss"], result["history"]["loss"], rtol=0.1)
