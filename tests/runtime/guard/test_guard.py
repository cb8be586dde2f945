"""Checks that differences between ranks are named on all, and one rank's changes are detected."""

import inspect
import time

import pytest
import tensorflow as tf

from tests.harness.pool import RankFailure
from tests.runtime.guard import guard_cases as cases
from tfdml.aggregation import TrimmedMean
from tfdml.compression import Float16
from tfdml.local_updates import LocalSGD
from tfdml.pipeline.parallel import PipelineParallel
from tfdml.strategies import HorovodStrategy, MultiWorkerMirroredStrategy
from tfdml.strategies.sharding import Sharding


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("optimizer", "for optimizer: SGD on rank 1, Adam on rank 0"),
        ("momentum", "for optimizer's `momentum`: 0.5 on rank 1, 0.9 on rank 0"),
        ("epochs", "for argument `epochs`: 3 on rank 1, 2 on rank 0"),
        ("steps per execution", "for compile's `steps_per_execution`: 2 on rank 1, 1 on rank 0"),
        ("call", "for call: evaluate on rank 1, fit on rank 0"),
    ],
)
def test_a_difference_is_an_error_on_every_rank(ranks, what, message):
    with pytest.raises(RankFailure) as failure:
        ranks(2).run(cases.different, what)
    assert sorted(failure.value.errors) == [0, 1]
    for error in failure.value.errors.values():
        assert message in error


# Options that a rank may choose for itself, and arguments that are not options of replicas.
OWN = {"self", "devices", "cluster_resolver", "silence_limit", "start_limit"}
OPTIONS = {
    "batch_split": ([3, 1], [1, 3]),
    "compression": (Float16(), None),
    "bucket_bytes": (64, 128),
    "check_desync": (1, 2),
    "local_updates": (LocalSGD(8), LocalSGD(16)),
    "gradient_aggregation": (TrimmedMean(0), None),
    "pipeline": (PipelineParallel(2), PipelineParallel(3)),
    "sharding": (Sharding(), None),
    "communication_options": (
        tf.distribute.experimental.CommunicationOptions(timeout_seconds=50),
        None,
    ),
}


def _options(strategy: type) -> set[str]:
    return inspect.signature(strategy.__init__).parameters.keys() - OWN


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("horovod", name) for name in sorted(_options(HorovodStrategy))),
        *(("multi_worker", name) for name in sorted(_options(MultiWorkerMirroredStrategy))),
    ],
)
def test_a_different_option_is_an_error_on_every_rank(ranks, kind, name):
    """A new option must be listed here with a different value, or as allowed to differ."""
    with pytest.raises(RankFailure) as failure:
        ranks(2, kind).run(cases.different_options, name, *OPTIONS[name])
    assert sorted(failure.value.errors) == [0, 1]
    for error in failure.value.errors.values():
        assert f"for strategy's `{name}`: " in error


@pytest.mark.parametrize("again", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_unequal_exchanges_end_the_job_in_seconds(ranks, again):
    began = time.monotonic()
    with pytest.raises(RankFailure) as failure:
        ranks(2).run(cases.unequal_exchanges, again)
    # The guard waits for 5 s; with its default limit this took two minutes.
    assert time.monotonic() - began < 45
    assert "exchanges something different from rank 0 in one step" in str(failure.value)


@pytest.mark.parametrize("what", ["width", "dtype"])
def test_a_different_variable_is_an_error_on_every_rank(ranks, what):
    with pytest.raises(RankFailure) as failure:
        ranks(2).run(cases.different, what)
    assert sorted(failure.value.errors) == [0, 1]
    for error in failure.value.errors.values():
        assert "Variables must be the same on all 2 ranks" in error
        assert "kernel (6, " in error
        assert "Detected at node" not in error


def test_changed_weight_is_detected(ranks):
    with pytest.raises(RankFailure) as failure:
        ranks(3).run(cases.changed_weights, 2)
    assert sorted(failure.value.errors) == [0, 1, 2]
    for error in failure.value.errors.values():
        assert "Received: a different value of" in error
        assert "bias on rank 1 (" in error


def test_changed_weight_is_ignored_without_the_check(ranks):
    ranks(3).run(cases.changed_weights, 0)


def test_a_monitor_names_the_rank_that_the_others_wait_for(ranks):
    for epochs in ranks(2).run(cases.monitored, 1):
        assert len(epochs) == 2
        for fast, slow in epochs:
            assert (fast.rank, slow.rank) == (0, 1)
            assert slow.compute > 0.15
            assert fast.wait > slow.wait
            assert slow.causes > 0.5


def test_callback_of_a_rank_is_known_to_the_others(ranks):
    (heard, own), (_, other) = ranks(2).run(cases.in_a_callback)
    assert "fit, epoch 0, step 2, in callback Holding.on_epoch_end" in heard
    assert own == other == "outside of fit, evaluate and predict"


def test_failing_guard_is_reported(ranks):
    """And not, a minute later, that a healthy rank was silent."""
    with pytest.raises(RankFailure) as failure:
        ranks(2).run(cases.guard_that_fails)
    assert "the guard itself failed on rank 1" in str(failure.value)
    assert "TypeError" in str(failure.value)


def test_a_rank_lost_while_variables_are_made_is_named(ranks):
    """Not a difference between the models, of which the broken exchange looks like one."""
    with pytest.raises(RankFailure) as failure:
        ranks(2).run(cases.killed_before_variables)
    assert "because rank 1 died" in str(failure.value)
    assert "Variables must be the same" not in str(failure.value)


def test_a_rank_that_gives_up_on_rank_0_tells_it(ranks):
    """It would be taken for dead otherwise, when only the network was cut."""
    with pytest.raises(RankFailure) as failure:
        ranks(2).run(cases.rank_0_unheard)
    assert "on all 2 ranks, because rank 0 fell silent" in str(failure.value)
    assert "on all 2 ranks, because rank 1 gave up on rank 0, which fell" in str(failure.value)


def test_ranks_left_behind_by_an_exception_are_ended(ranks):
    """The rank's program continues, as a pool's does; the other could wait forever."""
    with pytest.raises(RankFailure) as failure:
        ranks(2).run(cases.one_rank_raises_alone, 1)
    assert sorted(failure.value.errors) == [1]
    assert "because rank 1 raised an exception" in str(failure.value)
    assert "ValueError: alone" in str(failure.value)


@pytest.mark.parametrize("steps", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_monitor_shows_epochs_too_short_to_measure(ranks, steps):
    assert [len(epochs) for epochs in ranks(2).run(cases.monitored_short, steps)] == [2, 2]
