"""Checks that training with tables dealt to the ranks gives the numbers of one process."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.harness.pool import RankFailure
from tests.strategies.compare import assert_close
from tests.strategies.sharded import table_cases as cases
from tfdml.checkpointing import Files
from tfdml.checkpointing.names import DEALT
from tfdml.checkpointing.tensors import stored_tensors

BY_ROWS = (
    "plain_sgd", "sgd", "adam", "adagrad", "ftrl", "row_wise_adagrad", "lazy_adam", "lars", "lamb"
)  # fmt: skip
SHOWN = ("adam", "row_wise_adagrad")


NUMBERS = ("weights", "slots", "predicted")
# Keras keeps metrics in float32.
METRICS = ("history", "evaluated")


def _assert_equal(expected: dict, results: list[dict], rtol: float = 1e-10) -> None:
    for rank, result in enumerate(results):
        for names, tolerance in ((NUMBERS, rtol), (METRICS, max(rtol, 1e-6))):
            one, many = ({name: r[name] for name in names} for r in (expected, result))
            assert_close(one, many, tolerance, tolerance / 100, f"rank {rank}: ")


def _slow_unless(names: tuple[str, ...], shown: tuple[str, ...]) -> list:
    return [pytest.param(n, marks=() if n in shown else pytest.mark.slow) for n in names]


@pytest.mark.parametrize("size", [*(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4)), 3])
@pytest.mark.parametrize("name", _slow_unless(BY_ROWS, SHOWN))
def test_numbers_of_one_process_in_float64(ranks, name, size):
    (expected,) = ranks(1).run(cases.trained, "whole", name, None, "float64")
    _assert_equal(expected, ranks(size).run(cases.trained, "dealt", name, None, "float64"))


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", _slow_unless(BY_ROWS, ("adam",)))
def test_numbers_with_divided_slots_of_other_variables(ranks, name, size):
    (expected,) = ranks(1).run(cases.trained, "whole", name, None, "float64")
    _assert_equal(expected, ranks(size).run(cases.trained, "both", name, None, "float64"))


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", _slow_unless(BY_ROWS, ("adam",)))
def test_numbers_between_workers(ranks, name, size):
    (expected,) = ranks(1).run(cases.trained, "whole", name, None, "float64")
    results = ranks(size, "multi_worker").run(cases.trained, "dealt", name, None, "float64")
    _assert_equal(expected, results)


@pytest.mark.parametrize("sharding", [pytest.param("dealt", marks=pytest.mark.slow), "both"])
def test_tables_and_slots_are_divided(ranks, sharding):
    (whole,) = ranks(1).run(cases.trained, "whole")
    parts = [result["bytes"] for result in ranks(3).run(cases.trained, sharding)]
    # What all ranks keep: the dense layers, their slots, and the counters of metrics and seeds.
    dense = sum(w.nbytes for w in whole["weights"][2:]) * 3
    tables = (cases.USERS + cases.ITEMS) * 6 * 4 * 3
    for rank, part in enumerate(parts):
        rows = sum(len(range(rank, n, 3)) for n in (cases.USERS, cases.ITEMS))
        assert rows * 6 * 4 * 3 <= part <= rows * 6 * 4 * 3 + dense + 100
    assert sum(parts) >= tables


WAYS: dict[str, dict[str, Any]] = {
    "two_devices": {"devices": 2},
    "shared": {"shared": True},
    "masked": {"mask": True},
    "steps_per_execution": {"options": {"steps_per_execution": 3}},
    "eager": {"options": {"run_eagerly": True}},
    "clipnorm": {"optimizer_options": {"clipnorm": 0.02}},
    "global_clipnorm": {"optimizer_options": {"global_clipnorm": 0.02}},
    "ema": {"optimizer_options": {"use_ema": True, "ema_overwrite_frequency": 3}},
    "accumulation": {"optimizer_options": {"gradient_accumulation_steps": 2}},
    "weight_decay": {"optimizer_options": {"weight_decay": 0.05}},
    "few_samples": {"samples": 33},
    "rank_without_rows": {"rows": 1},
    "uneven_parts": {"strategy_options": {"batch_split": [3, 1]}},
    "compressed": {"strategy_options": {"compression": "bf16"}},
    "chained": {"kind": "chained"},
    "twice": {"kind": "twice"},
    "twice_eagerly": {"kind": "twice", "options": {"run_eagerly": True}},
    "seeded": {"embeddings_initializer": "glorot_normal"},
    "orthogonal": {"embeddings_initializer": "orthogonal"},
}


@pytest.mark.parametrize(
    "way",
    _slow_unless(
        tuple(WAYS),
        ("two_devices", "shared", "masked", "clipnorm", "rank_without_rows", "twice"),
    ),
)
@pytest.mark.parametrize(
    "strategy", ["horovod", pytest.param("multi_worker", marks=pytest.mark.slow)]
)
def test_ways_to_train(ranks, strategy, way):
    arguments = {"name": "adam", "dtype": "float64", **WAYS[way]}
    alone = {**arguments, "devices": 1}
    if way == "uneven_parts":
        alone["strategy_options"] = None
    if way == "compressed":
        expected = ranks(2, strategy).run(_trained, "whole", arguments)[0]
    else:
        (expected,) = ranks(1).run(_trained, "whole", alone)
    _assert_equal(expected, ranks(2, strategy).run(_trained, "dealt", arguments))


def _trained(sharding: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return cases.trained(sharding, **arguments)


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        # One exchange of ids, of rows and of gradients for both tables.
        ("plain", ["table_ids_0", "table_rows_0/float32", "table_gradients_0/float32"]),
        # The second table's ids are known only then.
        ("chained", ["table_ids_0", "table_rows_0/float32"] * 2 + ["table_gradients_0/float32"]),
    ],
)
@pytest.mark.parametrize(
    "strategy", ["horovod", pytest.param("multi_worker", marks=pytest.mark.slow)]
)
def test_all_tables_of_a_step_are_exchanged_together(ranks, strategy, kind, rows):
    for names in ranks(2, strategy).run(cases.exchanges, kind):
        assert len(names) == len(rows), names
        assert [n.split("_")[1] for n in names] == [n.split("_")[1] for n in rows]


@pytest.mark.parametrize("way", ["clipnorm", "global_clipnorm"])
@pytest.mark.slow
def test_clipping_changes_the_numbers(ranks, way):
    clipped = ranks(2).run(_trained, "dealt", {"dtype": "float64", **WAYS[way]})[0]
    plain = ranks(2).run(_trained, "dealt", {"dtype": "float64"})[0]
    assert not np.allclose(clipped["slots"][2], plain["slots"][2], rtol=0.1)


@pytest.mark.parametrize(
    "dtype", ["mixed_float16", pytest.param("mixed_bfloat16", marks=pytest.mark.slow)]
)
def test_mixed_precision(ranks, dtype):
    scaled = dtype == "mixed_float16"
    (expected,) = ranks(1).run(cases.trained, "whole", "adam", None, dtype, 1, scaled)
    # Relative to weights, of which the largest are 0.1 in a table.
    results = ranks(2).run(cases.trained, "dealt", "adam", None, dtype, 1, scaled)
    _assert_equal(expected, results, 0.2)


def test_a_loss_scale_beside_an_optimizer_of_the_base_class(ranks):
    (expected,) = ranks(1).run(cases.trained, "whole", "adam", None, "float32", 1, True)
    for result in ranks(2).run(cases.scaled_after_a_bare_optimizer):
        assert_close(expected["weights"], result["weights"], 1e-4, 1e-5)


@pytest.mark.slow
def test_a_loop_of_ones_own(ranks):
    (expected,) = ranks(1).run(cases.own_loop, "whole")
    for weights in ranks(2).run(cases.own_loop, "dealt"):
        assert_close(expected, weights)


def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks):
    for scale, iterations in ranks(2).run(cases.overflowing):
        assert iterations == 0, "The step was made."
        assert scale == 32.0


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((2, "dealt"), (3, "dealt")),
        pytest.param((2, "dealt"), (2, "dealt"), marks=pytest.mark.slow),
        pytest.param((3, "both"), (2, "both"), marks=pytest.mark.slow),
        pytest.param((2, "dealt"), (1, "whole"), marks=pytest.mark.slow),
        pytest.param((1, "whole"), (2, "dealt"), marks=pytest.mark.slow),
        pytest.param((2, "whole"), (3, "both"), marks=pytest.mark.slow),
        pytest.param((2, "both"), (2, "dealt"), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", _slow_unless(("adam", "row_wise_adagrad"), ("adam",)))
def test_a_checkpoint_resumes_on_other_ranks(ranks, tmp_path, name, first, second):
    (size, sharding), (other_size, other) = first, second
    begun = ranks(size).run(cases.resumed, str(tmp_path), 1, sharding, name)[0]
    for result in ranks(other_size).run(cases.resumed, str(tmp_path), 1, other, name):
        for kind in ("weights", "slots"):
            for a, b in zip(begun[kind], result[kind], strict=True):
                np.testing.assert_array_equal(a, b)
    on = ranks(other_size).run(cases.resumed, str(tmp_path), 2, other, name)
    whole = ranks(1).run(cases.trained, "whole", name)[0]
    for result in on:
        assert_close(whole["weights"], result["weights"])


def _dealt_bytes(directory: Path) -> dict[str, list[tuple[int, int]]]:
    """Returns where the rows of divided tables and of their slots are, by the file's path."""
    found = {}
    for file in directory.glob("fit-*/*.safetensors"):
        tensors, _ = stored_tensors(Files(), str(file))
        dealt = [t for name, t in tensors.items() if name.endswith(DEALT)]
        found[str(file)] = [(t.begin, t.begin + t.nbytes) for t in dealt]
    return found


@pytest.mark.parametrize(
    ("size", "read"),
    [(2, {1: {1}}), pytest.param(3, {1: {0, 1}, 2: {0, 1}}, marks=pytest.mark.slow)],
)
def test_a_rank_reads_its_own_rows_unless_the_ranks_change(ranks, tmp_path, size, read):
    """Rank 0 reads all once more: it checks the checkpoint that it chooses."""
    ranks(2).run(cases.resumed, str(tmp_path), 1, "dealt")
    dealt = _dealt_bytes(tmp_path)
    # Two tables, and two slots of each.
    assert [len(places) for places in dealt.values()] == [6, 6]
    reads = ranks(size).run(cases.read_while_resuming, str(tmp_path), "dealt")
    for rank, expected in read.items():
        found = set()
        for path, begin, end in reads[rank]:
            for first, last in dealt.get(path, ()):
                if begin < last and (end is None or first < end):
                    found.add(int(Path(path).name.split("-")[1]))
        assert found == expected


@pytest.mark.slow
def test_accumulated_gradients_of_rows_are_restored_on_other_ranks(ranks, tmp_path):
    options = {"gradient_accumulation_steps": 2}
    # An epoch has five steps: one has been accumulated at its end.
    ranks(2).run(cases.resumed, str(tmp_path), 1, "dealt", "adam", options)
    whole = ranks(1).run(cases.trained, "whole", "adam", options)[0]
    for result in ranks(3).run(cases.resumed, str(tmp_path), 2, "dealt", "adam", options):
        assert_close(whole["weights"], result["weights"])


@pytest.mark.parametrize("by_callback", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_saved_model_is_an_ordinary_file(ranks, tmp_path, by_callback):
    path = str(tmp_path / "model.keras")
    written = ranks(2).run(cases.saved, path, "dealt", by_callback)[0]
    (alone,) = ranks(1).run(cases.loaded, path, "whole")
    for size, sharding in ((2, "dealt"), (3, "both")):
        for result in ranks(size).run(cases.loaded, path, sharding):
            for kind in ("weights", "slots"):
                for a, b in zip(written[kind], result["before"][kind], strict=True):
                    np.testing.assert_array_equal(a, b)
            assert_close(alone["weights"], result["weights"])


def test_a_file_that_rank_0_alone_has_loaded_is_refused(ranks, tmp_path):
    path = str(tmp_path / "model.keras")
    ranks(2).run(cases.saved, path, "dealt", False)
    for message in ranks(2).run(cases.loaded_by_rank_0, path):
        assert "must be loaded on all 2 ranks" in message


REFUSED = {
    "regularizer": "`embeddings_regularizer` must be None for a table that is divided",
    "constraint": "`embeddings_constraint` must be None for a table that is divided",
    "optimizer": "Received: Lamb, which may need whole tables. Use one of those, or leave out",
    "tied": "`embeddings` must not be read in a step if the table is divided",
    "outside": "Gradients of a table that is divided among the ranks must be applied in a step",
    "lora": "`enable_lora` must not be called for a table that is divided",
    "quantize": "`quantize` must not be called for a table that is divided",
    "remat": "must not be called in a block of `tfdml.remat`",
    "h5": "`filepath` must end in .keras",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(ranks, what):
    for message in ranks(2).run(cases.error_of, what):
        assert REFUSED[what] in message


def test_an_id_out_of_range_is_named_with_its_layer_and_place(ranks):
    with pytest.raises(RankFailure) as failure:
        ranks(2).run(cases.error_of, "id")
    wanted = (
        r"Ids must be from 0 to 39, the rows of the layer \W*of_items.*the id: \[?40\]? at this"
    )
    assert re.search(wanted, str(failure.value))
