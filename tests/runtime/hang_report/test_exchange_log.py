"""Checks the record of exchanges: of graphs and outside of them, and how many are kept."""

import threading
import time

import numpy as np
import pytest
import tensorflow as tf

from tfdml.runtime.hang_report.exchange_log import EXCHANGE_LOG, KEPT
from tfdml.runtime.hang_report.graph_events import BATCH, count_events


def turns_of(*names: str) -> list[int]:
    """Returns how often these have begun."""
    turns = EXCHANGE_LOG.read()[1]
    return [turns.get(name, 0) for name in names]


def noted(name: str, sent: tf.Tensor, received: tf.Tensor) -> None:
    EXCHANGE_LOG.note_in_graph(name, [sent], [received])


def test_a_graph_notes_each_run():
    @tf.function
    def step(value):
        sums = tf.sqrt(value)
        noted("log/run", value, sums)
        return sums

    before = time.time()
    for _ in range(3):
        step(tf.constant(4.0))
    assert count_events() == 6
    assert turns_of("log/run") == [0]
    EXCHANGE_LOG.collect(at_least=7)
    assert turns_of("log/run") == [0]
    EXCHANGE_LOG.collect()
    assert count_events() == 0
    found = [e for e in EXCHANGE_LOG.read()[0] if e.name == "log/run"]
    assert [e.turn for e in found] == [1, 2, 3]
    for exchange in found:
        assert before <= exchange.begun <= exchange.done <= time.time()


@pytest.mark.parametrize("where", ["loop", "branch", "nested", "mapped"])
def test_a_graph_within_a_graph_notes_too(where):
    name = f"log/{where}"

    def part(value):
        sums = value + 1.0
        noted(name, value, sums)
        return sums

    @tf.function
    def step(value):
        if where == "loop":
            return tf.while_loop(lambda i, _: i < 3, lambda i, v: (i + 1, part(v)), (0, value))[1]
        if where == "branch":
            return tf.cond(value > 0.0, lambda: part(value), lambda: value)
        if where == "mapped":
            return tf.map_fn(part, value * tf.ones([3]))
        return tf.function(lambda: part(value))()  # It captures the value.

    step(tf.constant(1.0))
    step(tf.constant(-9.0))
    EXCHANGE_LOG.collect()
    assert turns_of(name) == [{"loop": 6, "branch": 1, "nested": 2, "mapped": 6}[where]]
    assert all(e.done for e in EXCHANGE_LOG.read()[0] if e.name == name)


def test_an_exchange_that_has_not_ended_is_open_and_others_are_noted():
    release = threading.Event()

    def wait(value):
        assert release.wait(20)
        return value

    @tf.function
    def step(value):
        results = []
        for name, function in (("log/waits", wait), ("log/passes", lambda value: value)):
            results.append(tf.numpy_function(function, [value], tf.float32, stateful=False))
            noted(name, value, results[-1])
        return results

    def named(name):
        return [e for e in EXCHANGE_LOG.read()[0] if e.name == name]

    thread = threading.Thread(target=step, args=(tf.constant(1.0),))
    thread.start()
    try:
        deadline = time.monotonic() + 15
        while time.monotonic() < deadline:
            time.sleep(0.02)
            EXCHANGE_LOG.collect()
            if [e for e in named("log/passes") if e.done] and named("log/waits"):
                break
        # Operations with effects run in the order in which they were made; notes must not.
        assert [e.is_open for e in named("log/passes")] == [False]
        assert [e.is_open for e in named("log/waits")] == [True]
        # Those that begin and end later do not push it out.
        for _ in range(2 * KEPT):
            with EXCHANGE_LOG.eager("log/others"):
                pass
        assert [e.is_open for e in named("log/waits")] == [True]
    finally:
        release.set()
        thread.join()
    EXCHANGE_LOG.collect()
    assert not [e for e in EXCHANGE_LOG.read()[0] if e.is_open]


def test_an_exception_is_no_end():
    with pytest.raises(ValueError, match="no"), EXCHANGE_LOG.eager("log/failed"):
        raise ValueError("no")
    (exchange,) = [e for e in EXCHANGE_LOG.read()[0] if e.name == "log/failed"]
    assert (exchange.failed, exchange.done, exchange.is_open) == (True, None, False)


def test_a_note_costs_few_operations():
    """Each takes about a third of a microsecond; `tools/bench/guard.py` times them."""

    @tf.function
    def step(values):
        total = tf.add_n(values)
        before = len(tf.compat.v1.get_default_graph().get_operations())
        EXCHANGE_LOG.note_in_graph("log/operations", values, [total])
        added = tf.compat.v1.get_default_graph().get_operations()[before:]
        assert sorted(op.type for op in added) == sorted(
            ["NoOp"] + ["Const", "Timestamp", "Stage"] * 2
        )
        return total

    step([tf.constant(1.0)] * 50)
    EXCHANGE_LOG.collect()


def test_the_last_ones_are_kept_and_all_are_counted():
    @tf.function
    def step(value):
        for number in range(4):
            value = value + 1.0
            noted(f"log/many_{number}", value, value)
        return value

    runs = BATCH
    for _ in range(runs):
        step(tf.constant(0.0))
    EXCHANGE_LOG.collect()
    assert turns_of(*(f"log/many_{number}" for number in range(4))) == [runs] * 4
    exchanges = EXCHANGE_LOG.read()[0]
    assert len(exchanges) == KEPT
    assert {e.name for e in exchanges} == {f"log/many_{number}" for number in range(4)}
    begun = np.array([e.begun for e in exchanges])
    assert (np.diff(begun) >= 0).all()
    assert [e.turn for e in exchanges if e.name == "log/many_3"][-1] == runs


def test_notes_have_no_gradient_and_no_place_in_a_checkpoint(tmp_path):
    class Module(tf.Module):
        def __init__(self):
            super().__init__()
            self.weight = tf.Variable(3.0)

        @tf.function
        def __call__(self, value):
            product = self.weight * value
            noted("log/module", value, product)
            return product

    module = Module()
    with tf.GradientTape() as tape:
        product = module(tf.constant(2.0))
    assert tape.gradient(product, module.weight).numpy() == 2.0
    assert [v.name for v in module.variables] == ["Variable:0"]
    path = tf.train.Checkpoint(module=module).save(str(tmp_path / "checkpoint"))
    saved = {name for name, _ in tf.train.list_variables(path)}
    assert not [name for name in saved if "event" in name or "exchange" in name]
