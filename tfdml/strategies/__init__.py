"""Distribution strategies under which plain `model.fit` trains on several replicas."""

from tfdml.strategies.horovod import HorovodStrategy
from tfdml.strategies.mirrored import MirroredStrategy
from tfdml.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy

__all__ = ["HorovodStrategy", "MirroredStrategy", "MultiWorkerMirroredStrategy"]
