"""What a case asks about the job that it runs in: its strategy, and this rank."""

import os

import tensorflow as tf

from tfdml.strategies import (
    HorovodStrategy,
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    ParameterServerStrategy,
)
from tfdml.topology import launched

KIND = os.environ.get("TFDML_TEST_KIND", "horovod")


def strategy(devices: int = 1, **options: object) -> tf.distribute.Strategy:
    """Returns a new strategy of the job's kind.

    Args:
        devices: Replicas of each process. A mirrored job has as many as the job's size, whatever
            is asked for.
        **options: The constructor's.
    """
    if KIND == "parameter_server":
        return ParameterServerStrategy(synchronous=True, **options)
    if KIND == "mirrored":
        devices = int(os.environ["TFDML_TEST_SIZE"])
    names = [f"CPU:{i}" for i in range(devices)]
    if KIND == "mirrored":
        return MirroredStrategy(devices=names, **options)
    if KIND == "multi_worker":
        return MultiWorkerMirroredStrategy(devices=names, **options)
    return HorovodStrategy(devices=names, **options)


def rank() -> int:
    """Returns this process's rank."""
    return int(os.environ.get("TFDML_TEST_RANK", launched().rank))
