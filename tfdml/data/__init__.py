"""Sharded TFRecords: the same bytes from any number of processes, readable from any position.

Writing needs no TensorFlow. Public names are imported on first use.
"""

import importlib
from typing import Any

_NAMES = {
    "Feature": "format.schema",
    "Schema": "format.schema",
    "TFRecordPipeline": "read.pipeline",
    "read_tfrecords": "read.read_tfrecords",
    "verify": "check.verification",
    "write_tfrecords": "write.write_tfrecords",
}

__all__ = sorted(_NAMES)


def __getattr__(name: str) -> Any:
    """Imports a public name on first use (PEP 562)."""
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_NAMES[name]}")
    globals()[name] = getattr(module, name)
    return globals()[name]
