"""Checks the bytes that `tools.bench.divided_tables` counts, against counts by hand."""

import numpy as np
import pytest

from tools.bench.divided_tables import __main__ as program
from tools.bench.divided_tables import traffic
from tools.bench.divided_tables.model import TABLES, WIDTH

ROW = 4 * WIDTH
# Bytes of the layers' gradients: all that is sent for a batch without samples.
LAYERS = {ranks: traffic.loop(np.zeros((0, TABLES), int), 8, ranks) for ranks in (2, 4)}


def _in_the_first_table(*ids: int) -> np.ndarray:
    """Returns samples with these ids in the first table, and id 0, which rank 0 has, elsewhere."""
    batch = np.zeros((len(ids), TABLES), int)
    batch[:, 0] = ids
    return batch


def test_layers_are_those_of_the_model():
    from tools.bench.divided_tables.rank import build

    numbers = build(rows=2).count_params() - TABLES * 2 * WIDTH
    assert {2: 4 * numbers, 4: 6 * numbers} == LAYERS


@pytest.mark.parametrize(
    ("codec", "row"), [(None, 4 * WIDTH), ("bfloat16", 2 * WIDTH), ("int8", WIDTH + 4)]
)
def test_each_id_is_asked_for_once_and_only_from_other_ranks(codec, row):
    # Rank 0 has even rows: it wants 1 and 3. Rank 1 wants 4 and 2, and 0 of each other table.
    ids = _in_the_first_table(1, 1, 2, 3, 4, 2, 1, 1)
    asked = 2 + TABLES - 1
    assert traffic.divided(ids, 8, 2, codec) == LAYERS[2] + 2 * (4 + row) + asked * row


def test_gradients_of_whole_tables_go_to_all_others():
    ids = _in_the_first_table(1, 1, 2, 3, 4, 2, 1, 1)
    # 1, 2 and 3 of the first table, and 0 of each other one.
    assert traffic.whole(ids, 8, 2) == LAYERS[2] + (3 + TABLES - 1) * (8 + ROW)
    # Rank 0's samples are the first two.
    assert traffic.whole(ids, 8, 4) == LAYERS[4] + 3 * TABLES * (8 + ROW)
    assert traffic.loop(ids, 8, 2) == LAYERS[2] + 4 * TABLES * (8 + ROW)
    assert traffic.loop(ids, 8, 4) == LAYERS[4] + 3 * 2 * TABLES * (8 + ROW)


def test_torchrec_sends_sums():
    ids = np.repeat(_in_the_first_table(1, 5, 4, 3, 4, 2, 1, 1), 3, axis=1)
    # By rows: rank 0 has 0 to 3, and 5 and 4 are others'. A sum, its gradient and the number of ids
    # of each sample and table.
    by_rows = 2 * 3 * 8 + 4 * TABLES * (4 + 2 * ROW)
    assert traffic.torchrec_by_rows(ids, 8, 2) == LAYERS[2] + by_rows
    # By tables, with four ranks: rank 0 has two of the tables and two of the samples.
    asked, own = 2 * (TABLES - 2), 6 * 2
    by_tables = asked * (3 * 8 + 4 + ROW) + own * ROW
    assert traffic.torchrec_by_tables(ids, 8, 4) == LAYERS[4] + by_tables


def test_rows_of_the_table_have_a_formula_where_there_is_one():
    found = {"step": 0.01, "sent": 2e6, "peak": 100.0}
    formula = program.bytes_by_formula("divided", 1000, 1, 2)
    less = program.bytes_by_formula("divided, int8 rows", 1000, 1, 2)
    assert LAYERS[2] < less < formula < program.bytes_by_formula("whole", 1000, 1, 2)
    cells = program.row("divided", found, 4096, formula).split(" | ")
    assert float(cells[3]) == pytest.approx(formula / 1e6, abs=0.005)
    assert program.bytes_by_formula("parameter servers", 1000, 1, 2) is None
    assert program.row("parameter servers", found, 4096, None).split(" | ")[2:4] == ["2.00", "–"]
    header = f"| candidate | {' | '.join(program.COLUMNS)} |".split(" | ")
    assert header[3] == "MB by formula"
