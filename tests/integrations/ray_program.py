"""Trains on a real local Ray cluster, and prints what rank 0 has seen as JSON.

python -m tests.integrations.ray_program NAME DIRECTORY
"""

import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.data
import ray.train
from ray import tune
from ray.cluster_utils import Cluster
from ray.tune.integration.ray_train import TuneReportCallback

from tfdml.integrations.ray import KerasConfig, KerasTrainer

# The last batch of an epoch has 8 rows.
ROWS, BATCH, STEPS = 200, 48, 5
# What happens to the workers does so after this step, in the second epoch.
EVENT = 7
OBJECTS = 200 << 20
COLUMNS = {"feature_columns": "data", "label_columns": "data", "batch_size": BATCH}


def train(config: dict[str, Any]) -> dict[str, Any]:
    """Trains on a rank; returns its losses, weights and surroundings.

    Args:
        config: `horovod`; `alone`, for a process without Ray; `blocks`, rows of each block of a
            Ray dataset; `epochs`, `rate`, `save_freq`; `event`, see `at_event`; and `directory`.
    """
    import keras
    import tensorflow as tf

    import tfdml
    from tfdml.integrations.ray import ReportCheckpointCallback, read_shard

    kind = tfdml.HorovodStrategy if config.get("horovod") else tfdml.MultiWorkerMirroredStrategy
    strategy = kind()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(4)])
        model.compile(keras.optimizers.Adam(config.get("rate", 0.01)), "mse")
    begun: list[tuple[int, int]] = []

    class Watch(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_begin(self, batch, logs=None):
            begun.append((self.epoch, batch))

        def on_train_batch_end(self, batch, logs=None):
            if self.epoch * STEPS + batch + 1 >= EVENT:
                at_event(config, strategy.rank, strategy.size)

    callbacks: list[keras.callbacks.Callback] = [Watch()]
    if not config.get("alone"):
        frequency = config.get("save_freq", 2)
        callbacks.append(ReportCheckpointCallback(frequency, asynchronous=False))
    data: dict[str, Any] = {"x": rows(), "y": rows() @ TARGET, "batch_size": BATCH}
    if "blocks" in config:
        is_alone = config.get("alone")
        source = global_batches(config["blocks"]) if is_alone else read_shard("train", **COLUMNS)
        data = {"x": source}
    history = model.fit(**data, epochs=config.get("epochs", 3), verbose=0, callbacks=callbacks)
    return {
        "loss": history.history["loss"],
        "weights": [w.tolist() for w in model.get_weights()],
        "size": strategy.size,
        "rank": strategy.rank,
        "first": begun[0],
        "keras": tf.keras.__version__,
    }


TARGET = np.diag([1.0, 2.0, 3.0, 4.0]).astype("float32")


def rows() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")


def blocks_of(sizes: list[int]) -> list[np.ndarray]:
    return np.split(rows(), np.cumsum(sizes)[:-1])


def global_batches(sizes: list[int]):
    """Returns the global batches of two workers with the blocks 0, and 1 and 2."""
    import tensorflow as tf

    first, *rest = blocks_of(sizes)
    parts = [first, np.concatenate(rest)]
    half = BATCH // 2
    starts = range(0, max(map(len, parts)), half)
    batches = [np.concatenate([p[start : start + half] for p in parts]) for start in starts]
    spec = tf.TensorSpec((None, 4), tf.float32)
    pairs = tf.data.Dataset.from_generator(
        lambda: ((batch, batch) for batch in batches), output_signature=(spec, spec)
    )
    return pairs.apply(tf.data.experimental.assert_cardinality(len(batches)))


def at_event(config: dict[str, Any], rank: int, size: int) -> None:
    """Once: "kill" kills rank 1; "wait" keeps one rank waiting; "slow" makes two ranks slow."""
    event, marker = config.get("event"), Path(config.get("directory", "."), "event")
    if event == "kill" and rank == 1 and not marker.exists():
        marker.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
    elif event == "wait" and size == 1:
        marker.touch()
        time.sleep(500.0)
    elif event == "slow" and size == 2:
        marker.touch()
        time.sleep(1.0)


def trainer(config: dict[str, Any], workers: Any = 2, **options: Any) -> KerasTrainer:
    run = {"name": "run", "storage_path": config["directory"], **options.pop("run", {})}
    return KerasTrainer(
        train,
        train_loop_config=config,
        keras_config=KerasConfig(horovod=config.get("horovod", False)),
        scaling_config=ray.train.ScalingConfig(
            num_workers=workers, elastic_resize_monitor_interval_s=2.0
        ),
        run_config=ray.train.RunConfig(**run),
        **options,
    )


def start(cpus: int) -> None:
    ray.init(
        "local",
        num_cpus=cpus,
        object_store_memory=OBJECTS,
        _node_ip_address="127.0.0.1",
        include_dashboard=False,
    )


def numbers(config: dict[str, Any]) -> dict[str, Any]:
    """Two workers, in an environment that has Keras 3 switched off."""
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    start(2)
    result = trainer(config).fit()
    model = Path(result.checkpoint.path, "model.keras")
    reports = [metrics for _, metrics in result.best_checkpoints]
    return {**result.return_value, "reports": reports, "model": str(model)}


def horovod(config: dict[str, Any]) -> dict[str, Any]:
    return numbers({**config, "horovod": True})


def killed(config: dict[str, Any]) -> dict[str, Any]:
    start(2)
    failures = ray.train.FailureConfig(max_failures=1)
    return trainer({**config, "event": "kill"}, run={"failure_config": failures}).fit().return_value


def data(config: dict[str, Any]) -> dict[str, Any]:
    """Ray Data: blocks of which two workers get 80 and 120 rows."""
    start(3)
    config = {**config, "blocks": [80, 60, 60]}
    dataset = ray.data.from_numpy(blocks_of(config["blocks"]))
    return trainer(config, datasets={"train": dataset}).fit().return_value


def search(config: dict[str, Any]) -> dict[str, Any]:
    """Ray Tune around it: two learning rates, each on two workers."""
    start(3)

    def trial(parameters: dict[str, float]) -> None:
        name = tune.get_context().get_trial_id()
        run = {"name": name, "callbacks": [TuneReportCallback()]}
        trainer({**config, **parameters}, run=run).fit()

    tuner = tune.Tuner(
        trial,
        param_space={"rate": tune.grid_search([0.001, 0.1])},
        tune_config=tune.TuneConfig(metric="loss", mode="min", max_concurrent_trials=1),
    )
    results = tuner.fit()
    best = results.get_best_result()
    return {
        "rate": best.config["rate"],
        "loss": best.metrics["loss"],
        "model": str(Path(best.metrics["checkpoint_path"], "model.keras")),
        "trials": len(results),
        "errors": results.num_errors,
    }


def grown(config: dict[str, Any]) -> dict[str, Any]:
    """One worker, which a second one joins on a new node."""
    cluster = cluster_of(1)
    return fit_and(
        cluster,
        lambda: cluster.add_node(num_cpus=1, object_store_memory=OBJECTS),
        {**config, "event": "wait"},
    )


def preempted(config: dict[str, Any]) -> dict[str, Any]:
    """Two workers on a node each, of which one is preempted, with 25 s notice."""
    cluster = cluster_of(1)
    node = cluster.add_node(num_cpus=1, object_store_memory=OBJECTS)
    drain = [Path(sys.executable).with_name("ray"), "drain-node", "--node-id", node.node_id]
    drain += ["--address", cluster.address, "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
    drain += ["--reason-message", "test", "--deadline-remaining-seconds", "25"]
    return fit_and(
        cluster,
        lambda: subprocess.run(drain, check=True, stdout=sys.stderr),
        {**config, "event": "slow", "save_freq": 10**6, "epochs": 12},
    )


def cluster_of(cpus: int) -> Cluster:
    head = {"num_cpus": cpus, "object_store_memory": OBJECTS, "include_dashboard": False}
    return Cluster(initialize_head=True, connect=True, head_node_args=head)


def fit_and(cluster: Cluster, action: Callable[[], Any], config: dict[str, Any]) -> dict[str, Any]:
    """Trains on one or two workers, and does something once they have come to the event."""
    marker = Path(config["directory"], "event")
    # Ray starts nodes in the main thread alone.
    with concurrent.futures.ThreadPoolExecutor() as pool:
        result = pool.submit(trainer(config, workers=(1, 2)).fit)
        while not (marker.exists() or result.done()):
            time.sleep(0.2)
        action()
        found = result.result().return_value
    ray.shutdown()
    cluster.shutdown()
    return found


def alone(config: dict[str, Any]) -> dict[str, Any]:
    """The same on one process, without Ray."""
    return {
        name: train({**config, "alone": True, **own})
        for name, own in {
            "numbers": {},
            "preempted": {"epochs": 12},
            "search": {"rate": 0.1},
            "data": {"blocks": [80, 60, 60]},
        }.items()
    }


if __name__ == "__main__":
    name, directory = sys.argv[1:]
    cases = (numbers, horovod, killed, data, search, grown, preempted, alone)
    case = next(each for each in cases if each.__name__ == name)
    found = case({"directory": directory})
    Path(directory, f"{name}.json").write_text(json.dumps(found))
    if ray.is_initialized():
        ray.shutdown()
