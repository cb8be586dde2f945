"""Checks the rank of a cluster's task, for any resolver."""

import json

import pytest
import tensorflow as tf

import tfdml
from tfdml.strategies import (
    HorovodStrategy,
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    cluster_member,
)

CLUSTER = {"worker": ["a:1", "b:1"], "chief": ["c:1"], "ps": ["d:1"]}


@pytest.mark.parametrize(
    ("task", "rank"), [(("chief", 0), 0), (("worker", 0), 1), (("worker", 1), 2)]
)
def test_the_chief_comes_first(task, rank):
    topology = cluster_member._topology(CLUSTER, *task)
    assert (topology.rank, topology.size, topology.is_chief) == (rank, 3, rank == 0)


@pytest.mark.parametrize("task", [("ps", 0), ("evaluator", 0), ("worker", 2), (None, None)])
def test_a_task_that_does_not_train_is_an_error(task):
    with pytest.raises(ValueError, match="must say which chief or worker this process is"):
        cluster_member._topology(CLUSTER, *task)


def test_process_without_a_cluster_is_alone(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    strategy = MultiWorkerMirroredStrategy()
    assert (strategy.rank, strategy.size, strategy.cluster_resolver.task_type) == (0, 1, None)


def test_one_worker_needs_no_server():
    spec = tf.train.ClusterSpec({"worker": ["localhost:1"]})
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        spec, task_type="worker", task_id=0
    )
    assert MultiWorkerMirroredStrategy(resolver).num_replicas_in_sync == 1


@pytest.mark.parametrize("devices", ["CPU:0", []])
def test_arguments_are_checked(devices):
    with pytest.raises(ValueError, match="`devices` must be a non-empty list"):
        MultiWorkerMirroredStrategy(devices=devices)


WORKERS = json.dumps(
    {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}
)
HOROVOD = {f"HOROVOD_{n}": "1" for n in ("RANK", "LOCAL_SIZE")} | {"HOROVOD_SIZE": "2"}


@pytest.mark.parametrize(
    ("strategy", "variables", "launcher"),
    [
        (MultiWorkerMirroredStrategy, {**HOROVOD, "HOROVOD_LOCAL_RANK": "0"}, "horovodrun"),
        (MirroredStrategy, {**HOROVOD, "HOROVOD_LOCAL_RANK": "0"}, "horovodrun"),
        (HorovodStrategy, {"TF_CONFIG": WORKERS}, "TF_CONFIG"),
        (MirroredStrategy, {"TF_CONFIG": WORKERS}, "TF_CONFIG"),
    ],
)
def test_unrelated_processes_are_an_error(monkeypatch, strategy, variables, launcher):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    message = f"one process, in rank 1 of 2 according to {launcher}.* Use `tfdml"
    with pytest.raises(ValueError, match=message):
        strategy()
    with tfdml.alone():
        assert MirroredStrategy().size == 1
