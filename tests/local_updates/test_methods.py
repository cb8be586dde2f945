"""Checks the arguments of methods and rules, and the intervals that rules give."""

import keras
import pytest

import tfdml
from tfdml.local_updates import DiLoCo, LinkSyncRule, LocalSGD, QuadraticSyncRule
from tfdml.local_updates.sync_rules import LastRound


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LocalSGD(0), "`sync_every` must be a positive number of steps"),
        (lambda: LocalSGD(True), "`sync_every` must be a positive number of steps"),
        (lambda: LocalSGD("often"), "`sync_every` must be a positive number of steps"),
        (lambda: LocalSGD(warmup_steps=-1), "`warmup_steps` must be a number of steps"),
        (lambda: LocalSGD(average_slots=1), "`average_slots` must be True or False"),
        (lambda: DiLoCo(num_fragments=0), "`num_fragments` must be a positive integer"),
        (lambda: DiLoCo(synchronous_hosts=1), "`synchronous_hosts` must be True or False"),
        (lambda: DiLoCo(outer_optimizer=0.7), "`outer_optimizer` must be a Keras optimizer"),
        (
            lambda: DiLoCo(outer_optimizer=keras.optimizers.SGD(use_ema=True)),
            "`outer_optimizer` must not have `use_ema`",
        ),
        (lambda: QuadraticSyncRule(0), "`alpha` must be a positive number"),
        (lambda: QuadraticSyncRule(0.1, 0), "`min_steps` must be a positive integer"),
        (lambda: QuadraticSyncRule(0.1, 4, 3), "`max_steps` must be an integer of at least"),
        (lambda: LinkSyncRule(1.0), "`max_fraction` must be a fraction of the time"),
        (lambda: LinkSyncRule(max_steps=0), "`max_steps` must be a positive integer"),
        (
            lambda: tfdml.HorovodStrategy(local_updates=16),
            "`local_updates` must be a method of `tfdml.local_updates`",
        ),
    ],
)
def test_wrong_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_quadratic_rule():
    rule = QuadraticSyncRule(alpha=0.2, min_steps=4)
    intervals = [rule.next_interval(LastRound(1, rate)) for rate in (0.2, 0.1, 0.05, 0.01)]
    assert intervals == [4, 4, 16, 400]
    assert rule.next_interval(LastRound(7, 0.0)) == 4
    assert rule.next_interval(LastRound(7, 1e-6)) == 1000


def test_link_rule_keeps_the_fraction():
    rule = LinkSyncRule(0.2, max_steps=50)
    # 8 steps of 10 ms and an exchange of 20 ms: a fifth.
    assert rule.next_interval(LastRound(1, 0.1, 0.010, 0.020)) == 8
    assert rule.next_interval(LastRound(1, 0.1, 0.010, 0.0001)) == 1
    assert rule.next_interval(LastRound(1, 0.1, 0.010, 9.0)) == 50
    assert rule.next_interval(LastRound(3, 0.1)) == 3, "Not measured yet."


def test_outer_optimizers_are_copies():
    given = keras.optimizers.SGD(0.7, momentum=0.9)
    method = DiLoCo(outer_optimizer=given)
    one, other = method.make_outer_optimizer(), method.make_outer_optimizer()
    assert one is not other
    assert one is not given
    assert one.get_config() == given.get_config()


def test_representation_has_the_arguments():
    assert repr(LocalSGD(8)) == (
        "LocalSGD(sync_every=8, warmup_steps=0, average_slots=False, synchronous_hosts=False)"
    )
    assert "'learning_rate': 0.7" in repr(DiLoCo())
