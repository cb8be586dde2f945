"""Functions with which a case gets its job's strategy and this rank."""

import os
from collections.abc import Sequence

import tensorflow as tf

from tfdml.strategies import (
    HorovodStrategy,
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    ParameterServerStrategy,
)
from tfdml.topology import launched

KIND = os.environ.get("TFDML_TEST_KIND", "horovod")


def strategy(
    devices: int | Sequence[Sequence[str]] = 1, **options: object
) -> tf.distribute.Strategy:
    """Returns a new strategy of the job's kind.

    Args:
        devices: Replicas of each process, or a group of devices for each. Without groups, a
            mirrored job has as many as its size.
        **options: Arguments of the constructor.
    """
    if KIND == "parameter_server":
        return ParameterServerStrategy(synchronous=True, **options)
    if KIND == "mirrored" and isinstance(devices, int):
        devices = int(os.environ["TFDML_TEST_SIZE"])
    names = [f"CPU:{i}" for i in range(devices)] if isinstance(devices, int) else devices
    if KIND == "mirrored":
        return MirroredStrategy(devices=names, **options)
    if KIND == "multi_worker":
        return MultiWorkerMirroredStrategy(devices=names, **options)
    return HorovodStrategy(devices=names, **options)


def rank() -> int:
    """Returns this process's rank."""
    return int(os.environ.get("TFDML_TEST_RANK", launched().rank))
