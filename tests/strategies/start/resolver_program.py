"""Training script whose cluster is described by a chosen resolver.

    resolver_program.py DIRECTORY KIND [ADDRESS...]

It trains briefly and saves its weights in DIRECTORY, under its rank.
"""

import os
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfdml

resolvers = tf.distribute.cluster_resolver


def simple(task: str, *addresses: str) -> resolvers.ClusterResolver:
    """The addresses are those of all workers."""
    spec = tf.train.ClusterSpec({"worker": list(addresses)})
    return resolvers.SimpleClusterResolver(spec, task_type="worker", task_id=int(task))


def slurm(port: str) -> resolvers.ClusterResolver:
    """The variables that `srun` sets; GPUs are counted here, instead of by nvidia-smi."""
    tasks = int(os.environ["SLURM_STEP_NUM_TASKS"])
    return resolvers.SlurmClusterResolver(
        port_base=int(port), gpus_per_node=tasks, gpus_per_task=1, auto_set_gpu=False
    )


def kubernetes(task: str, server: str) -> resolvers.ClusterResolver:
    """The API server lists the pods."""
    from kubernetes import client

    api = client.CoreV1Api(client.ApiClient(client.Configuration(host=server)))
    resolver = resolvers.KubernetesClusterResolver(override_client=api)
    resolver.task_type, resolver.task_id = "worker", int(task)
    return resolver


def main(directory: str, kind: str, *arguments: str) -> None:
    """Trains as one of the cluster's workers; alone if the kind is "none"."""
    make = {"simple": simple, "slurm": slurm, "kubernetes": kubernetes}.get(kind)
    strategy = tfdml.MultiWorkerMirroredStrategy(make(*arguments) if make else None)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)]
        )
        model.compile("adam", "mse")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(52, 6)).astype("float32")
    model.fit(x, x.sum(1), batch_size=8, epochs=2, shuffle=False, verbose=0)
    np.savez(Path(directory, f"{kind}_{strategy.rank}_of_{strategy.size}"), *model.get_weights())


if __name__ == "__main__":
    main(*sys.argv[1:])
