"""Checks how a table's rows are dealt to the ranks."""

import numpy as np
import pytest

from tfdml.collectives.row_deal import RowDeal


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("shape", [(1000, 3), (5, 2), (7,), (2, 4, 3)])
def test_ranks_own_each_row_once_and_join_them(shape, ranks):
    deal = RowDeal(shape, ranks)
    table = np.arange(np.prod(shape)).reshape(shape)
    parts = [deal.part_of(table, rank) for rank in range(ranks)]
    assert [part.shape for part in parts] == [deal.part_shape(rank) for rank in range(ranks)]
    for rank, part in enumerate(parts):
        np.testing.assert_array_equal(part, table[np.arange(len(table)) % ranks == rank])
    np.testing.assert_array_equal(deal.join([part.reshape(-1) for part in parts]), table)


def test_rows_of_another_number_of_ranks_are_joined():
    table = np.arange(30).reshape(10, 3)
    parts = [RowDeal((10, 3), 4).part_of(table, rank) for rank in range(4)]
    np.testing.assert_array_equal(RowDeal((10, 3), 2).join(parts), table)


def test_a_number_for_each_row_is_dealt_like_the_rows():
    deal = RowDeal((10, 3), 4).of_rows()
    assert [deal.part_shape(rank) for rank in range(4)] == [(3,), (3,), (2,), (2,)]
