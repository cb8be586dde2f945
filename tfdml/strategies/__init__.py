"""Distribution strategies under which plain `model.fit` trains on several replicas."""

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
