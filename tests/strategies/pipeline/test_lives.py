"""Models in stages can be saved, resumed, loaded and compiled again, like any other."""

import pytest

from tests.strategies.compare import assert_close
from tests.strategies.pipeline import lives

FLOAT64 = {"rtol": 1e-10, "atol": 1e-10}


@pytest.mark.parametrize(
    "cuts",
    [
        ("two_groups", "four_stages"),
        pytest.param(("four_stages", "plain"), marks=pytest.mark.slow),
        pytest.param(("plain", "two_groups"), marks=pytest.mark.slow),
    ],
    ids="-".join,
)
def test_a_checkpoint_is_resumed_under_another_cut(ranks, tmp_path, cuts):
    ((whole, end),) = ranks(4, "mirrored").run(lives.resumed, cuts, "residual", str(tmp_path))
    assert_close(whole, end, **FLOAT64)


@pytest.mark.parametrize(
    "cuts",
    [
        ("two_groups", "four_stages"),
        pytest.param(("four_stages", "plain"), marks=pytest.mark.slow),
        pytest.param(("plain", "two_groups"), marks=pytest.mark.slow),
    ],
    ids="-".join,
)
def test_a_model_is_saved_and_loaded_in_the_scope(ranks, tmp_path, cuts):
    path = str(tmp_path / "model.keras")
    ((whole, end),) = ranks(4, "mirrored").run(lives.loaded, cuts, "residual", path)
    assert_close(whole, end, **FLOAT64)


def test_a_resumed_job_keeps_the_cut(ranks, tmp_path):
    """Measured times would give another one, and other bits."""
    ((first, resumed, other),) = ranks(4, "mirrored").run(lives.cuts_of_two_jobs, str(tmp_path))
    assert first == resumed == [0, 1, 1]
    assert other == [0, 0, 1]


@pytest.mark.parametrize("cut", ["two_groups", pytest.param("four_stages", marks=pytest.mark.slow)])
def test_calls_in_any_order(ranks, cut):
    """Graphs that were traced before variables are moved must not keep the old ones."""
    ((plain, staged),) = ranks(4, "mirrored").run(lives.both_in_any_order, cut, "residual")
    assert_close(plain, staged, **FLOAT64)


def test_a_model_that_is_not_compiled_predicts(ranks):
    ((plain, staged),) = ranks(4, "mirrored").run(lives.both_predicted, "two_groups")
    assert_close(plain, staged, **FLOAT64)


@pytest.mark.slow
def test_callbacks(ranks, tmp_path):
    args = "two_groups", str(tmp_path)
    ((plain, staged),) = ranks(4, "mirrored").run(lives.both_with_callbacks, *args)
    assert len(plain["history"]["loss"]) < 6, "It was to stop early."
    assert_close(plain, staged, **FLOAT64)
    assert list((tmp_path / "two_groups" / "train").iterdir())
