"""Functions with which a case gets its job's strategy and this rank."""

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
        devices: Replicas of each process. Ignored in a mirrored job, which has as many as its
            size.
        **options: Arguments of the constructor.
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
