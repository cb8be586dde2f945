"""Checks the bytes that `tools.bench.frequent_rows` counts, against counts by hand."""

import numpy as np

from tools.bench.frequent_rows import WIDTH, sent

ROW = 4 * WIDTH


def test_each_id_is_asked_for_once_and_only_from_other_ranks():
    # Rank 0 owns 2 and 4, rank 1 owns 1 and 3.
    ids = np.array([[1, 1, 2, 3], [4, 2, 1, 1]])
    assert sent(ids, np.array([], int), 2) == (2 + 2) * (4 + 2 * ROW) / 2


def test_copies_save_their_lookups_and_cost_their_sum():
    ids = np.array([[1, 1, 2, 3], [4, 2, 1, 1]])
    by_hand = (1 + 1) * (4 + 2 * ROW) / 2 + 2 * ROW
    assert sent(ids, np.array([1, 2]), 2) == by_hand
