"""Multi-GPU and multi-node training for Keras 3 on TensorFlow, under plain `fit`.

```python
import tfdml

strategy = tfdml.HorovodStrategy()
with strategy.scope():
    model = build()
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(dataset, epochs=10)
```

The names of `tf.distribute`, such as `tfdml.ReduceOp`, are available too, so a script can replace
`tf.distribute.` by `tfdml.`.

Public names are loaded on first use: `import tfdml` imports neither TensorFlow nor Horovod, so the
command line starts at once and a machine without Horovod can use the rest. In processes started by
`horovodrun` or `mpirun`, importing tfdml filters TensorFlow's known start-up messages from then on.
"""

import importlib
import importlib.util
from typing import Any

_MODULES = (
    "aggregation",
    "callbacks",
    "compression",
    "data",
    "elastic",
    "local_updates",
    "memory",
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

# Functions, by the module that has them.
_FUNCTIONS = {
    "alone": "strategies.alone",
    "estimate_memory": "memory",
    "find_batch_size": "batch_size",
    "PipelineParallel": "pipeline.parallel",
    "remat": "strategies.remat",
    "Sharding": "strategies.sharding",
}

__all__ = [*_MODULES, *_STRATEGIES, *_FUNCTIONS, "__version__"]


def __getattr__(name: str) -> Any:
    """Loads a public name on first use (PEP 562).

    Args:
        name: The attribute asked for.

    Returns:
        The module, class or version string of that name.

    Raises:
        AttributeError: If neither tfdml nor `tf.distribute` has such a public name.
    """
    if name == "__version__":
        value = _version()
    elif name in _MODULES:
        value = importlib.import_module(f"{__name__}.{name}")
    elif name in _STRATEGIES:
        value = getattr(importlib.import_module(f"{__name__}.strategies"), name)
    elif name in _FUNCTIONS:
        value = getattr(importlib.import_module(f"{__name__}.{_FUNCTIONS[name]}"), name)
    else:
        return _find_in_tensorflow(name)
    globals()[name] = value
    return value


def _find_in_tensorflow(name: str) -> Any:
    """Returns the object of that name in `tf.distribute`, importing TensorFlow."""
    # Python looks up special names, and names of submodules before it imports them.
    if name.startswith("_") or importlib.util.find_spec(f"{__name__}.{name}"):
        raise AttributeError(f"module 'tfdml' has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.strategies.tensorflow_names").find(name)


def __dir__() -> list[str]:
    """Lists the public names, loaded or not."""
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("tfdml")
    except metadata.PackageNotFoundError:
        # The package is used from a source tree that was never installed.
        return "0+uninstalled"


def _filter_startup_noise() -> None:
    topology = importlib.import_module(f"{__name__}.topology")
    if topology.is_launched():
        startup_noise = importlib.import_module(f"{__name__}.runtime.startup_noise")
        startup_noise.filter_import_of_tensorflow()
        topology.set_default("TF_CPP_MIN_LOG_LEVEL", "1")


_filter_startup_noise()
