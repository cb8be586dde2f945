"""Checks when ranks synchronize, and that they do nothing together in between."""

import dataclasses
import math
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdml
from tests.harness import rank_job
from tests.harness.pool import RankFailure
from tests.strategies.cases import data
from tests.strategies.compare import assert_same_bits
from tests.strategies.local_updates import cases
from tests.strategies.local_updates.waiting import Waiting
from tfdml.local_updates import QuadraticSyncRule
from tfdml.strategies.fit_session import get_session


def _with_recorder(local_updates: tuple, options: dict) -> dict:
    return cases.recorded(local_updates, **options)


def _synchronized(ranks, local_updates, **options) -> list[int]:
    """Returns the steps, from 1, after which ranks have synchronized, the same on both."""
    results = ranks(2).run(_with_recorder, local_updates, options)
    assert results[0]["synchronized"] == results[1]["synchronized"]
    return [i for i, is_done in enumerate(results[0]["synchronized"], 1) if is_done]


def test_each_epoch_counts_anew(ranks):
    assert _synchronized(ranks, ("LocalSGD", {"sync_every": 3})) == [3, 6, 10, 13]


def test_an_execution_of_several_steps_is_not_interrupted(ranks):
    options = {"compile_options": {"steps_per_execution": 2}}
    found = _synchronized(ranks, ("LocalSGD", {"sync_every": 3}), **options)
    # Of 4 executions an epoch, the second and the fourth.
    assert found == [2, 4, 6, 8]


def test_fragments_take_turns(ranks):
    fragments = ("DiLoCo", {"sync_every": 4, "num_fragments": 2})
    # The second one begins half an interval earlier.
    assert _synchronized(ranks, fragments) == [2, 4, 6, 9, 11, 13]


def test_quadratic_rule_follows_the_rate(ranks):
    """With alpha 0.2 and rates 0.1 and, from step 4 on, 0.05: after 4 steps, then 16."""
    found = ranks(2).run(_quadratic)
    assert found[0] == found[1] == [4]


def _quadratic() -> list[int]:
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([3], [0.1, 0.05])
    rule = ("LocalSGD", {"sync_every": QuadraticSyncRule(0.2, min_steps=2)})
    options = {"optimizer_options": {"learning_rate": rate}, "rows": 8 * 19, "epochs": 1}
    result = cases.recorded(rule, optimizer="plain", **options)
    return [i for i, is_done in enumerate(result["synchronized"], 1) if is_done]


def test_measured_interval_is_the_same_on_all_ranks(ranks):
    """Rank 1's steps take longer; both know the same times."""
    one, other = ranks(2).run(_measured)
    assert one == other
    assert one["step"] > 0
    assert 0 < one["exchange"] < 10
    busy = one["exchange"] * 0.9 / 0.1
    assert one["sync_every"] == max(1, math.ceil(busy / one["step"]))


def _measured() -> dict:
    found = {}

    class Slow(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            time.sleep(0.02 * (1 + rank_job.rank()))

        def on_epoch_end(self, epoch, logs=None):
            rounds = get_session(self.model).rounds
            _, found["step"], found["exchange"] = rounds.clock.read()
            found["sync_every"] = rounds.turns.sync_every

    cases.trained(("LocalSGD", {"sync_every": "auto"}), callbacks=[Slow()])
    return found


def test_interval_is_measured_although_ranks_have_no_rows(ranks):
    """Rank 1 has rows for 5 of 8 steps of each epoch; then comes a round in which nobody has any.

    A round without a step says nothing about times.
    """
    one, other = ranks(2).run(_measured_to_the_end)
    assert_same_bits([one, other])
    assert one["intervals"] == other["intervals"]
    for interval, step, exchange, after_no_rows in one["intervals"]:
        assert step > 0
        assert 0 < exchange < 10
        assert interval == max(1, math.ceil(exchange * 0.9 / 0.1 / step))
        assert after_no_rows == interval


def _measured_to_the_end() -> dict:
    """Returns intervals at the epochs' ends, and the times by which they were chosen."""
    intervals = []

    class Watching(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            rounds = get_session(self.model).rounds
            interval, (_, step, exchange) = rounds.turns.sync_every, rounds.clock.read()
            rounds.begin_step()
            rounds.finish()
            intervals.append((interval, step, exchange, rounds.turns.sync_every))

    local = ("LocalSGD", {"sync_every": "auto"})
    result = cases.trained(local, own_data=True, epochs=3, callbacks=[Watching()])
    return {**result, "intervals": intervals}


def test_between_synchronizations_nobody_waits(ranks, tmp_path):
    """Rank 1 waits after its first step until rank 0 has taken its third."""
    ranks(2).run(_one_waits, ("LocalSGD", {"sync_every": 4}), str(tmp_path))


def _one_waits(local_updates: tuple, directory: str) -> None:
    waiting = Waiting(3, directory)
    cases.trained(local_updates, epochs=1, rows=32, callbacks=[waiting])
    assert waiting.has_waited or waiting.rank == 0


def test_one_rank_stops_all_at_a_synchronization(ranks):
    """Rank 1 asks after its first step, as `TerminateOnNaN` does by its own logs."""
    for result in ranks(2).run(_stopped):
        assert result["synchronized"] == [False, False, True]
        assert len(result["history"]["loss"]) == 1


def _stopped() -> dict:
    class Stopping(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if rank_job.rank() == 1 and batch == 0:
                self.model.stop_training = True

    recorder = cases.Recorder()
    local = ("LocalSGD", {"sync_every": 3})
    result = cases.trained(local, callbacks=[Stopping(), recorder])
    return {**result, "synchronized": recorder.synchronized}


def test_prediction_by_a_part_of_the_model_ends_the_round(ranks):
    for common in ranks(2).run(_predicting):
        assert common == [True]


def _predicting() -> list[bool]:
    class Predicting(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.common: list[bool] = []

        def on_train_batch_end(self, batch, logs=None):
            if batch == 0:
                with self.model.distribute_strategy.scope():
                    part = keras.Model(self.model.inputs, self.model.layers[0].output)
                part.predict(np.zeros([4, 6]), verbose=0)
                self.common.append(get_session(self.model).rounds.has_common_weights)

    predicting = Predicting()
    cases.trained(("LocalSGD", {"sync_every": 5}), epochs=1, callbacks=[predicting])
    return predicting.common


def test_epoch_logs_of_own_train_steps_are_the_jobs(ranks):
    one, other = ranks(2).run(_own_logs)
    assert one == other
    assert one["number"] == [0.5]


class OwnLogs(keras.Sequential):
    """Model whose train step returns a number that is no metric: its rank."""

    def train_step(self, data):
        """Trains by Keras's step."""
        return {**super().train_step(data), "number": tf.constant(float(rank_job.rank()))}


def _own_logs() -> dict:
    strategy = rank_job.strategy(local_updates=cases.method_of(("LocalSGD", {"sync_every": 3})))
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = OwnLogs([keras.layers.Input((6,)), keras.layers.Dense(3)])
        model.compile("sgd", cases.loss_of)
    x, y = data(32)
    return model.fit(x, y, batch_size=8, verbose=0).history


def test_weights_of_fragments_are_compared_when_all_are_common(ranks):
    fragments = ("DiLoCo", {"sync_every": 3, "num_fragments": 3})
    ranks(2).run(_checked, fragments)


def _checked(local_updates: tuple) -> None:
    cases.trained(local_updates, strategy_options={"check_desync": 1})


def test_different_batches_are_found_at_a_synchronization(ranks):
    with pytest.raises(RankFailure) as failure:
        ranks(2).run(_of_different_batches)
    assert "Batches must be the same on all 2 ranks" in str(failure.value)


def _of_different_batches() -> None:
    x, y = data(32)
    strategy = rank_job.strategy(local_updates=cases.method_of(("LocalSGD", {"sync_every": 3})))
    with strategy.scope():
        model = cases.make_model()
        model.compile("sgd", cases.loss_of)
    rank = rank_job.rank()
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).map(lambda a, b: (a + rank, b)).batch(8)
    model.fit(dataset, verbose=0)


@pytest.mark.slow
def test_step_monitor_shows_rounds(ranks):
    """Rounds of 3, 3 and 1 steps; steps of rank 1 take 20 ms more."""
    one, other = ranks(2).run(_monitored)
    assert one == other
    for first, second in one:
        # The first round of a training is not counted: 4 steps in two rounds, or 7 in three.
        assert second["compute"] - first["compute"] > 0.01
        assert first["wait"] > 0.02 > second["wait"]
        assert second["causes"] > 0.8


def _monitored() -> list[list[dict]]:
    class Slow(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            time.sleep(0.02 * rank_job.rank())

    monitor = tfdml.callbacks.StepMonitor()
    cases.trained(("LocalSGD", {"sync_every": 3}), callbacks=[Slow(), monitor])
    return [[dataclasses.asdict(times) for times in epoch] for epoch in monitor.epochs]


def test_ranks_draw_different_dropout(ranks):
    one, other = ranks(2).run(_masks)
    assert not np.array_equal(one, other)


def _masks() -> np.ndarray:
    strategy = rank_job.strategy(local_updates=cases.method_of(("LocalSGD", {"sync_every": 9})))
    found = []

    class Masked(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.seeds = keras.random.SeedGenerator(5)

        def call(self, x):
            drawn = keras.random.uniform([4], seed=self.seeds)
            tf.py_function(lambda value: found.append(value.numpy()), [drawn], [])
            return x + 0.0 * tf.reduce_sum(drawn)

    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((6,)), Masked(), keras.layers.Dense(3)])
        model.compile("sgd", "mse")
    model.fit(np.zeros([4, 6]), np.zeros([4, 3]), batch_size=4, verbose=0)
    return found[-1]


@pytest.mark.parametrize(
    ("options", "how", "message"),
    [
        ({"compression": "dgc"}, "arrays", "`compression` must not compute the optimizer's"),
        ({"sharding": "state"}, "arrays", "`sharding` must be None with `local_updates`"),
        ({}, "generator", "must have data that every rank reads itself"),
        ({}, "unseeded", "must have data that every rank reads itself"),
        ({}, "noise_scale", "`GradientNoiseScale` must not be used with `local_updates`"),
    ],
    ids=["momentum", "sharding", "generator", "unseeded", "noise_scale"],
)
def test_refused(ranks, options, how, message):
    for error in ranks(2).run(_refused, options, how):
        assert message in error, error


def _refused(options: dict, how: str) -> str:
    options = {"local_updates": ("LocalSGD", {}), **options}
    if "sharding" in options:
        options["sharding"] = tfdml.Sharding(optimizer_state=True)
    return cases.refused(options, how)
