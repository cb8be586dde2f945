"""Training on a Ray cluster by Ray Train; needs the extra `ray`."""

import importlib
from typing import Any

from tfdml.integrations.ray.backend import KerasConfig
from tfdml.integrations.ray.trainer import KerasTrainer, WholeDataConfig

# Loaded on first use: a worker imports this package before it may import TensorFlow.
_LATER = {"ReportCheckpointCallback": "report_checkpoint", "read_shard": "datasets"}

__all__ = ["KerasConfig", "KerasTrainer", "WholeDataConfig", *_LATER]


def __getattr__(name: str) -> Any:
    """Loads a public name that needs TensorFlow (PEP 562)."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
