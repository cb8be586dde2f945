"""Detection of logging callbacks, and of logging runs that ranks other than 0 have started."""

import sys
import warnings

import keras

# Packages whose callbacks only write or send, and are not aware of ranks.
_PACKAGES = (
    "aim",
    "clearml",
    "comet_ml",
    "mlflow",
    "neptune",
    "swanlab",
    "tensorboard",
    "trackio",
    "wandb",
)
_KERAS = (
    keras.callbacks.CSVLogger,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)


def is_logger(callback: keras.callbacks.Callback) -> bool:
    """Returns whether a callback's class, or a base class of it, is a known logger."""
    return isinstance(callback, _KERAS) or any(map(_is_known, type(callback).__mro__))


def _is_known(kind: type) -> bool:
    package = kind.__module__.partition(".")[0]
    # Integrations may be separate packages, such as `neptune_tensorflow_keras`.
    return any(package == known or package.startswith(f"{known}_") for known in _PACKAGES)


def warn_of_active_loggers(rank: int) -> None:
    """Warns of logging runs that this rank has started in addition to rank 0's.

    Args:
        rank: The rank of this process, not 0.
    """
    # Not imported here: a run can be active only if the program has imported its package.
    mlflow, wandb = sys.modules.get("mlflow"), sys.modules.get("wandb")
    active = getattr(mlflow, "active_run", None)
    if active is not None and active() is not None:
        _warn("MLflow", rank, "mlflow.autolog()` and `mlflow.start_run()")
    run = getattr(wandb, "run", None)
    if run is not None and not getattr(run, "disabled", False):
        _warn("Weights & Biases", rank, "wandb.init()")


def _warn(package: str, rank: int, calls: str) -> None:
    warnings.warn(
        f"A run of {package} is active on rank {rank}: there will be one run for each rank. Call "
        f"`{calls}` under `if strategy.is_chief:`.",
        stacklevel=2,
    )
