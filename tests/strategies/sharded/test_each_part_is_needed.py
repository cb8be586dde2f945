"""Checks that sharding fails without each function of Keras that is replaced for it alone."""

import pytest

from tests.harness.pool import RankFailure
from tests.strategies.seam.test_each_part_is_needed import without
from tests.strategies.sharded import cases, table_cases

AVERAGES = ("adam", True, {"use_ema": True})
# For each part, a case that needs it.
NEEDED_BY = {
    "TFOptimizer._overwrite_model_variables_with_average_value": (cases.trained, *AVERAGES),
    "BaseOptimizer.save_own_variables": (cases.trained, "adam", True),
    "legacy_h5_format.save_model_to_hdf5": (cases.error_of, "h5"),
    "distribution.set_distribution": (cases.error_of, "distribution"),
    "Embedding.build": (table_cases.bytes_of_tables,),
    "Embedding.embeddings": (table_cases.error_of, "tied"),
    "Embedding.enable_lora": (table_cases.error_of, "lora"),
    "Embedding.quantize": (table_cases.error_of, "quantize"),
    "Embedding.save_own_variables": (table_cases.trained, "dealt"),
    "Embedding.load_own_variables": (table_cases.assigned,),
}


def _comparable(result):
    if isinstance(result, str):
        return result
    return [value.tobytes() for value in [*result["weights"], *result["slots"]]]


@pytest.mark.slow
@pytest.mark.parametrize("part", NEEDED_BY)
def test_case_fails_without_the_part(ranks, part):
    case, *args = NEEDED_BY[part]
    expected = _comparable(ranks(2).run(case, *args)[0])
    try:
        found = ranks(2).run(without, part, case, *args, timeout=60)[0]
    except RankFailure:
        return
    assert _comparable(found) != expected
