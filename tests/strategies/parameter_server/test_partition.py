"""Checks partitioned variables: placement, optimizers, saved files, and sparse lookups."""

import re

import pytest
import tensorflow as tf

from tests.strategies.compare import assert_close
from tests.strategies.parameter_server import partition_cases as cases
from tfdml.strategies.parameter_server.cluster.placement import placement_table

slow = pytest.mark.slow


def test_variables_are_balanced_by_size(cluster):
    result = cluster.run(cases.placed_by_size)
    assert sum(result["bytes"]) == result["total"]
    assert abs(result["bytes"][0] - result["bytes"][1]) <= result["largest"]
    assert "ps 0" in result["table"]
    assert "kernel" in result["table"]


def test_table_of_variable_placement():
    placed = [("kernel", 1, tf.TensorShape([3, 4]), tf.float32)]
    lines = placement_table(placed, 2).splitlines()
    assert any("ps 1" in line and "kernel" in line and "48" in line for line in lines)
    assert any("ps 0" in line and "0 variables" in line for line in lines)


@pytest.mark.parametrize(
    "optimizer",
    [
        "adam",
        "RowWiseAdagrad",
        *(pytest.param(o, marks=slow) for o in ("LAMB", "adagrad", "clipnorm", "LARS", "LazyAdam")),
    ],
)
def test_partitioned_variable_trains_like_a_whole_one(ranks, cluster, optimizer):
    (one,) = ranks(1).run(cases.recommender, optimizer, False)
    many = cluster.run(cases.recommender, optimizer, True)
    assert many.pop("parts") == 2
    assert one.pop("parts") == 0
    assert many.pop("slot_devices") == many.pop("part_devices")
    one.pop("slot_devices"), one.pop("part_devices")
    assert_close(one, many, rtol=2e-5, atol=2e-6)


def test_an_update_is_not_traced_again_for_other_numbers_of_rows(cluster):
    assert cluster.run(cases.traces_of_updates) == 1


def test_rows_may_be_found_by_hashes(ranks, cluster):
    (one,) = ranks(1).run(cases.hashed, False)
    many = cluster.run(cases.hashed, True)
    assert (one.pop("parts"), many.pop("parts")) == (0, 2)
    assert_close(one, many, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("partitioned", [True, False])
@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_an_id_that_is_no_row_is_named(cluster, method, partitioned):
    message = cluster.run(cases.out_of_range, method, partitioned)
    words = r"Ids must be from 0 to 39, the rows of the layer \W*table.*"
    # `fit` shuffles, so the row of the batch is any.
    assert re.search(words + r"the id:\]? \[47\] \[?at this.*\[\[\d+ 2\]\]", message), message


@pytest.mark.parametrize("optimizer", ["adam", "RowWiseAdagrad"])
def test_saved_file_does_not_show_partitions(ranks, cluster, tmp_path, optimizer):
    saved = cluster.run(cases.save_partitioned, str(tmp_path), optimizer)
    (plain,) = ranks(1).run(cases.load_plain, str(tmp_path))
    assert_close(saved, plain)
    again = cluster.run(cases.load_partitioned, str(tmp_path))
    assert again.pop("parts") == 2
    assert_close(saved, again)


def test_slots_that_an_optimizer_has_stored_do_not_change(cluster):
    assert cluster.run(cases.stored_and_trained) == []


def test_lookups_fetch_rows_only(cluster):
    result = cluster.run(cases.traffic)
    assert result["gradient"] == "IndexedSlices"
    # The embedding has 8 MB; a step looks up 64 rows of 256 bytes.
    assert result["bytes_per_step"] < 400_000


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("wrong axis", "`variable_partitioner` must return a number of parts for the first axis"),
        ("constraint", "A partitioned variable must have no constraint"),
        ("no function", "`variable_partitioner` must be a function"),
    ],
)
def test_wrong_partitioners_are_refused(cluster, kind, words):
    assert words in cluster.run(cases.refused, kind)


def test_a_partitioner_may_leave_a_small_model_whole(cluster):
    warning, steps = cluster.run(cases.splits_nothing)
    assert "`variable_partitioner` splits no variable of this model" in warning
    assert steps == 3


@pytest.mark.parametrize("parts", [1, 3])
def test_initial_values_do_not_depend_on_the_number_of_parts(ranks, cluster, parts):
    (plain,) = ranks(1).run(cases.initial_values, 0)
    made = cluster.run(cases.initial_values, parts)
    for name, value in plain.items():
        assert made[name].tobytes() == value.tobytes(), name


def test_chief_never_has_a_large_table(cluster):
    result = cluster.run(cases.memory_of_a_large_table, 400)
    assert result["last"] > 0
    assert result["peak"] < 40


def test_chief_saves_and_loads_a_large_table_by_rows(cluster, tmp_path):
    """A table of 256 MB, and as much momentum, in four parts each."""
    result = cluster.run(cases.memory_of_a_saved_table, str(tmp_path), 256)
    assert (result["parts"], result["differ"]) == (8, 0)
    # A quarter of the table, which passes in blocks of 4 MB.
    assert result["save"] < 64
    assert result["load"] < 64
