"""Sharded TFRecords: written by any process in the same bytes, read from any place of any epoch.

Writing needs no TensorFlow; public names are loaded when they are first used.
"""

import importlib
from typing import Any

_NAMES = {
    "Feature": "schema",
    "Schema": "schema",
    "TFRecordPipeline": "pipeline",
    "read_tfrecords": "reading",
    "verify": "verification",
    "write_tfrecords": "iterable",
}

__all__ = sorted(_NAMES)


def __getattr__(name: str) -> Any:
    """Loads a public name on first use (PEP 562)."""
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_NAMES[name]}")
    globals()[name] = getattr(module, name)
    return globals()[name]
