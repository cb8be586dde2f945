"""Checks that the recommender trains under all four strategies, from one file."""

import json
import re

import pytest

from tests.recipes import cases

OPTIONS = {
    "users": 300,
    "items": 200,
    "width": 16,
    "batch_size": 128,
    "epochs": 4,
    "steps": 150,
}


def _trained(run, tmp_path, strategy: str, **more: bool) -> tuple[dict, str]:
    options = {**OPTIONS, "strategy": strategy, "result": tmp_path / "numbers.json", **more}
    output = run(cases.run, "recommender", options)
    return json.loads((tmp_path / "numbers.json").read_text()), output


@pytest.mark.slow
def test_recommender_with_partitioned_embeddings(cluster, tmp_path):
    numbers, output = _trained(cluster.run, tmp_path, "parameter_server")
    assert numbers["accuracy"] > 0.62  # Guessing gives 0.5.
    assert numbers["loss"][-1] < numbers["loss"][0]
    assert re.search(r"ps 1 .*part", output), output


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["horovod", "mirrored", "multi_worker"])
def test_the_same_file_under_the_other_strategies(ranks, tmp_path, strategy):
    numbers, output = _trained(lambda *case: ranks(2, strategy).run(*case)[0], tmp_path, strategy)
    assert numbers["accuracy"] > 0.62
    assert f"{strategy}: test accuracy" in output


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["horovod", "multi_worker"])
def test_divided_tables_train_alike(ranks, tmp_path, strategy):
    def run(*case):
        return ranks(2, strategy).run(*case)[0]

    whole, _ = _trained(run, tmp_path, strategy)
    divided, _ = _trained(run, tmp_path, strategy, sharding=True)
    assert divided["loss"] == pytest.approx(whole["loss"], rel=1e-3)
