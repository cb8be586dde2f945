"""A trial: a few training steps with a number of rows, in a process that may run out of memory."""

import contextlib
import ctypes
import dataclasses
import pickle
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdml.strategies.alone import alone
from tfdml.strategies.mirrored import MirroredStrategy

# Batches that are prefetched while others are trained on.
_STEPS = 3
# Of an error's text; a pipe that nobody reads yet holds 64 KB.
_LAST_CHARACTERS = 8000
_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True)
class TrialSetting:
    """Settings of the rank that trials stand for.

    Attributes:
        program: The pickled function that makes a model, and the data: a function of a number of
            rows, or arrays whose rows are repeated.
        path: Directories in which modules are found.
        cpus: The number of logical CPUs.
        gpus: Names of the physical GPUs that TensorFlow sees.
        devices: Names of the replicas' devices.
        policy: Name of Keras's dtype policy.
        floatx: Keras's dtype.
        gradient_copies: Copies of the gradients that exchanges with other ranks take.
        memory_limit: Bytes that training may take, on the host or on each GPU; None for all that
            is there.
    """

    program: bytes
    path: tuple[str, ...]
    cpus: int
    gpus: tuple[str, ...]
    devices: tuple[str, ...]
    policy: str
    floatx: str
    gradient_copies: int
    memory_limit: int | None

    @property
    def host_limit(self) -> int | None:
        """Bytes that training may take on the host; None for no limit."""
        return None if self.gpus else self.memory_limit


@dataclasses.dataclass(frozen=True)
class TrialOutcome:
    """Result of a trial.

    Attributes:
        fits: Whether the rows fit.
        error: Text of an error that more memory would not mend; "" for none.
    """

    fits: bool
    error: str = ""


def end_with_parent() -> None:
    """Makes this process end when its parent does."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def train(setting: TrialSetting, rows: int) -> TrialOutcome:
    """Takes a few steps with a number of rows on this process's replicas.

    Args:
        setting: Setting of the trial.
        rows: Rows of a batch of this process.
    """
    end_with_parent()
    # If the machine runs out of memory, its kernel ends this process before any rank.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    try:
        sys.path[:] = setting.path
        _configure(setting)
        with alone():
            _fit(setting, rows)
    except (MemoryError, tf.errors.ResourceExhaustedError):
        return TrialOutcome(False)
    except Exception:  # noqa: BLE001 (errors of the program are the caller's)
        return TrialOutcome(False, traceback.format_exc()[-_LAST_CHARACTERS:])
    return TrialOutcome(True)


def _configure(setting: TrialSetting) -> None:
    """Gives TensorFlow the rank's devices, and Keras its dtypes."""
    (cpu,) = tf.config.list_physical_devices("CPU")
    logical = [tf.config.LogicalDeviceConfiguration() for _ in range(setting.cpus)]
    tf.config.set_logical_device_configuration(cpu, logical)
    gpus = [g for g in tf.config.list_physical_devices("GPU") if g.name in setting.gpus]
    tf.config.set_visible_devices(gpus, "GPU")
    for gpu in gpus:
        if setting.memory_limit is None:
            tf.config.experimental.set_memory_growth(gpu, True)
        else:
            megabytes = setting.memory_limit >> 20
            part = tf.config.LogicalDeviceConfiguration(memory_limit=megabytes)
            tf.config.set_logical_device_configuration(gpu, [part])
    keras.config.set_floatx(setting.floatx)
    keras.config.set_dtype_policy(setting.policy)


def _fit(setting: TrialSetting, rows: int) -> None:
    build_model, data = pickle.loads(setting.program)
    strategy = MirroredStrategy(list(setting.devices))
    with strategy.scope():
        model = build_model()
        if not isinstance(model, keras.Model) or not model.compiled:
            raise ValueError(
                f"`build_model` must return a compiled keras.Model. Received: {model!r}. Call "
                f"`model.compile` in it."
            )
    batch = data(rows) if callable(data) else tf.nest.map_structure(_repeated(rows), data)
    batches = tf.data.Dataset.from_tensors(batch).repeat(_STEPS)
    model.fit(batches.take(1), verbose=0)  # Builds it, if it has no weights yet.
    weights = model.trainable_variables * setting.gradient_copies
    held = [tf.zeros(v.shape, v.dtype) for v in weights]
    model.fit(batches, verbose=0)
    del held


def _repeated(rows: int) -> Any:
    return lambda array: np.take(array, np.arange(rows) % len(array), axis=0)
