"""Distribution strategies under which plain `model.fit` trains on several replicas."""

# ruff: noqa: E402
from tfdml.known_versions import check_installed

# Comes first: what is imported below may be elsewhere in a Keras that is not known.
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
