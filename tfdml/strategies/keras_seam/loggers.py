"""Loggers of other packages: which callbacks they are, and which of them other ranks have begun."""

import sys
import warnings

import keras

# The packages whose callbacks do nothing but write or send, and know no ranks.
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
    """Returns whether a callback, or a class that it is made from, is a known logger."""
    return isinstance(callback, _KERAS) or any(map(_is_known, type(callback).__mro__))


def _is_known(kind: type) -> bool:
    package = kind.__module__.partition(".")[0]
    # Integrations are packages of their own: `neptune_tensorflow_keras`.
    return any(package == known or package.startswith(f"{known}_") for known in _PACKAGES)


def warn_of_active_loggers(rank: int) -> None:
    """Warns of runs that this rank has begun beside rank 0's.

    Args:
        rank: This process's, not 0.
    """
    # Never imported here: a run is active only where the program has imported its package.
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
