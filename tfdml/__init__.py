"""Multi-GPU and multi-node training for Keras 3 on TensorFlow, under plain `fit`.

```python
import tfdml

strategy = tfdml.HorovodStrategy()
with strategy.scope():
    model = build()
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(dataset, epochs=10)
```

Public names are loaded when they are first used: `import tfdml` imports neither TensorFlow nor
Horovod, so the command line starts at once and a machine without Horovod can use the rest. In a
rank of `horovodrun` or `mpirun`, TensorFlow's known start-up lines are filtered from here on.
"""

import importlib
from typing import Any

_MODULES = (
    "callbacks",
    "compression",
    "data",
    "elastic",
    "mixed_precision",
    "optimizers",
    "schedules",
    "strategies",
)
_STRATEGIES = (
    "HorovodStrategy",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
)

__all__ = [*_MODULES, *_STRATEGIES, "alone", "__version__"]


def __getattr__(name: str) -> Any:
    """Loads a public name on first use (PEP 562).

    Args:
        name: The attribute asked for.

    Returns:
        The module, class or version string of that name.

    Raises:
        AttributeError: If tfdml has no such public name.
    """
    if name == "__version__":
        value = _version()
    elif name in _MODULES:
        value = importlib.import_module(f"{__name__}.{name}")
    elif name in _STRATEGIES:
        value = getattr(importlib.import_module(f"{__name__}.strategies"), name)
    elif name == "alone":
        value = importlib.import_module(f"{__name__}.strategies.alone").alone
    else:
        raise AttributeError(f"module 'tfdml' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Lists the public names, loaded or not."""
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("tfdml")
    except metadata.PackageNotFoundError:
        # The package is used straight from a source tree that was never installed.
        return "0+uninstalled"


def _filter_startup_noise() -> None:
    topology = importlib.import_module(f"{__name__}.topology")
    if topology.is_launched():
        startup_noise = importlib.import_module(f"{__name__}.runtime.startup_noise")
        startup_noise.filter_import_of_tensorflow()
        topology.set_default("TF_CPP_MIN_LOG_LEVEL", "1")


_filter_startup_noise()
