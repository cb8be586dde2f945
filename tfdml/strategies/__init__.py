"""Distribution strategies under which plain `model.fit` trains on several replicas."""

# ruff: noqa: E402
from tfdml.known_versions import check_installed

# First: in an unknown Keras version, what is imported below may be somewhere else.
check_installed()

from tfdml.strategies.horovod import HorovodStrategy
from tfdml.strategies.mirrored import MirroredStrategy
from tfdml.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
from tfdml.strategies.parameter_server.strategy import ParameterServerStrategy

__all__ = [
    "HorovodStrategy",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
]
