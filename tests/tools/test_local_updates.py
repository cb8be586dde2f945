"""Checks the trial of local updates: what its simulation computes, and that it keeps results."""

import keras
import numpy as np
import pytest

from tools.bench.figures import stored_rows
from tools.bench.local_updates import trial
from tools.bench.local_updates.methods import METHODS, nesterov
from tools.bench.local_updates.simulation import (
    Method,
    Simulation,
    exchanges,
    local_rounds,
    shuffled,
)

SGD = keras.optimizers.SGD
ROWS, BATCH, EPOCHS = 40, 8, 2  # 5 steps an epoch.
SYNCHRONOUS = Method(synchronous=1.0)
BATCHES = shuffled(ROWS, BATCH, EPOCHS, seed=0)


def data(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    x = random.normal(size=(rows, 3)).astype("float32")
    return x, (x @ [[1.0], [-2.0], [0.5]] + 0.1).astype("float32")


def trained(
    method: Method, workers: int, inner: keras.Optimizer, rows: int = ROWS
) -> list[np.ndarray]:
    """Returns the weights of a small network after training with a method."""
    keras.utils.set_random_seed(0)
    layers = [keras.Input((3,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    simulation = Simulation(model, inner, keras.losses.MeanSquaredError(), workers)
    simulation.train(*data(rows), shuffled(rows, BATCH, EPOCHS, seed=0), EPOCHS, method)
    return model.get_weights()


def assert_equal(ours: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for a, b in zip(ours, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


# -- The simulation --------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_synchronizing_every_step_is_synchronous_training(momentum):
    """With momentum too: the mean of local velocities is the velocity of the mean."""
    expected = trained(SYNCHRONOUS, 1, SGD(0.1, momentum))
    assert_equal(trained(Method(1), 4, SGD(0.1, momentum)), expected)
    assert not np.allclose(trained(Method(2), 4, SGD(0.1, momentum))[0], expected[0], rtol=1e-5)


def test_workers_have_weights_by_their_rows():
    """The last batch of an epoch has 7 rows: 2, 2, 2 and 1."""
    expected = trained(SYNCHRONOUS, 1, SGD(0.1), rows=39)
    assert_equal(trained(Method(1), 4, SGD(0.1), rows=39), expected)


def test_an_outer_optimizer_of_rate_1_means_the_weights():
    expected = trained(Method(1), 2, SGD(0.1, 0.9))
    assert_equal(trained(Method(1, lambda: SGD(1.0)), 2, SGD(0.1, 0.9)), expected)


def test_synchronous_steps_come_first():
    """Local steps follow after 6 of 10 steps, in the middle of an epoch."""
    method = Method(3, synchronous=0.6)
    assert list(local_rounds(method, 2, 5)) == [slice(6, 9), slice(9, 10)]
    assert exchanges(method, 2, 5) == 6 + 2
    first = Method(1, synchronous=0.6)
    assert_equal(trained(first, 2, SGD(0.1, 0.9)), trained(SYNCHRONOUS, 1, SGD(0.1, 0.9)))


def test_epochs_end_with_a_synchronization():
    assert list(local_rounds(Method(4), 2, 5)) == [
        slice(0, 4), slice(4, 5), slice(5, 9), slice(9, 10)
    ]  # fmt: skip
    assert exchanges(SYNCHRONOUS, 2, 5) == exchanges(Method(1), 2, 5) == 10


def linear_by_hand(workers: int, every: int, rate: float, outer: bool) -> np.ndarray:
    """Trains y = xw in NumPy: local momentum 0.9; averaged, or by outer Nesterov of 0.7 and 0.9."""
    x, y = data()
    w, outer_velocity, step = np.zeros((3, 1)), np.zeros((3, 1)), 0
    velocities = [np.zeros((3, 1)) for _ in range(workers)]
    while step < len(BATCHES):
        end = min(step + every, (step // 5 + 1) * 5)
        ends = []
        for worker in range(workers):
            own = w
            for rows in BATCHES[step:end]:
                part = np.split(rows, workers)[worker]
                gradient = 2 * x[part].T @ (x[part] @ own - y[part]) / len(part)
                velocities[worker] = 0.9 * velocities[worker] - rate * gradient
                own = own + velocities[worker]
            ends.append(own)
        difference = w - np.mean(ends, axis=0)
        if outer:
            outer_velocity = 0.9 * outer_velocity - 0.7 * difference
            w = w + 0.9 * outer_velocity - 0.7 * difference
        else:
            w = w - difference
        step = end
    return w


@pytest.mark.parametrize("outer", [None, nesterov])
def test_rounds_are_those_computed_by_hand(outer):
    """Slots stay with their worker, the last round of an epoch is short, an outer step is right."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, use_bias=False)])
    model.set_weights([np.zeros((3, 1))])
    simulation = Simulation(model, SGD(0.05, 0.9), keras.losses.MeanSquaredError(), 4)
    simulation.train(*data(), BATCHES, EPOCHS, Method(3, outer))
    assert_equal(model.get_weights(), [linear_by_hand(4, 3, 0.05, outer is not None)])


def test_every_row_is_in_an_epoch_once():
    first, second = np.concatenate(BATCHES[:5]), np.concatenate(BATCHES[5:])
    assert sorted(first) == sorted(second) == list(range(ROWS))
    assert list(first) != list(second)


def test_what_cannot_be_simulated_is_refused():
    with pytest.raises(ValueError, match=r"each of 4 workers. Received: a batch of 3 rows"):
        trained(Method(2), 4, SGD(0.1), rows=35)
    model = keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization()])
    with pytest.raises(ValueError, match=r"must have no variables that are not trained.*mean"):
        Simulation(model, SGD(0.1), keras.losses.MeanSquaredError(), 2)


# -- The trial -------------------------------------------------------------------------------------


class Interrupted(Exception):
    """Stands for what ends a run."""


class FewTrainings:
    """A workload that is cut off after some trainings."""

    def __init__(self, left: int):
        self.left = left

    def result(self, method: Method, workers: int, seed: int) -> float:
        if not self.left:
            raise Interrupted
        self.left -= 1
        return 0.5 + seed

    def exchanges(self, method: Method) -> int:
        return method.sync_every


def test_an_interrupted_trial_goes_on_where_it_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(trial, "NOTED", tmp_path / "rows.json")
    workload = FewTrainings(left=4)
    monkeypatch.setattr(trial, "WORKLOADS", {"images": lambda: workload})
    with pytest.raises(Interrupted):
        trial.in_job([], None)
    kept = stored_rows(trial.NOTED)
    assert [row[:4] for row in kept] == [list(each) for each in trial.trainings()[:4]]
    workload.left = 3
    trial.in_job(["LocalSGD(64)"], 1)
    assert stored_rows(trial.NOTED)[:4] == kept
    assert stored_rows(trial.NOTED)[4][:4] == ["images", "LocalSGD(64)", 2, 0]
    assert len(trial.missing(stored_rows(trial.NOTED), [])) == len(trial.trainings()) - 5


def test_one_seed_comes_after_the_other():
    found = trial.trainings()
    assert len(found) == len(set(found)) == 3 * 2 * (1 + 2 * (len(METHODS) - 1))
    assert [each.seed for each in found] == sorted(each.seed for each in found)


def test_results_are_compared_with_the_same_seeds():
    base = {0: 0.8, 1: 0.9, 2: 0.76}
    assert trial.cell("images", base, None) == "82.00 (76.00–90.00)"
    assert trial.cell("images", {0: 0.79}, base) == "79.00 (79.00–79.00) -1.00; seeds 0"
    assert trial.cell("text", {0: 3.3}, {0: 3.0}).startswith("3.300 (3.300–3.300) +10.0 %")
    assert trial.cell("text", {}, base) == "not measured"


def test_the_page_shows_the_stored_results():
    page = trial.PAGE.read_text(encoding="utf-8")
    for workload in trial.WORKLOADS:
        assert trial.table(workload, stored_rows(trial.NOTED)) in page
    assert trial.with_tables(page, ["a", "b"]).count("exchanges |") == 0
