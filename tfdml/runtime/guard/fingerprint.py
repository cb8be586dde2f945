"""Check that all processes make the same call with the same model.

Everything that could differ is compared as text.
"""

import contextlib
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.optimizers.schedules import LearningRateSchedule as Schedule

from tfdml.collectives.collective import Collective
from tfdml.collectives.texts import gather_texts

# Arguments that may differ between ranks: they only affect what a rank displays and writes.
_OWN_AFFAIRS = frozenset({"self", "callbacks", "verbose"})


def fingerprint(
    model: keras.Model, call: str, arguments: Mapping[str, Any], strategy: Mapping[str, Any]
) -> dict[str, str]:
    """Returns everything that must be identical on all processes before a call's first step.

    Args:
        model: Model that the call is made on.
        call: Name of the call, such as "fit".
        arguments: Arguments of the call, by name.
        strategy: Options of the strategy, by name.

    Returns:
        Texts by the name of the setting, argument or variable.
    """
    found = {
        "call": call,
        "TensorFlow": tf.__version__,
        "Keras": keras.__version__,
        **{f"strategy's `{name}`": _in_words(value) for name, value in strategy.items()},
        "model": type(model).__name__,
    }
    for name, value in arguments.items():
        if name not in _OWN_AFFAIRS:
            found[f"argument `{name}`"] = _in_words(value)
    for variable in model.variables:
        kind = "weight" if variable.trainable else "state"
        # A rank may have some rows of a table; the whole one is the same for all.
        shape = getattr(variable, "whole_shape", variable.shape)
        found[f"{kind} {variable.path}"] = f"{tuple(shape)} {variable.dtype}"
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        found["optimizer"] = type(optimizer).__name__
        for name, value in optimizer_config(optimizer).items():
            if name != "name":
                found[f"optimizer's `{name}`"] = _in_words(value)
    for name in ("loss", "steps_per_execution", "run_eagerly", "jit_compile"):
        found[f"compile's `{name}`"] = _in_words(getattr(model, name, None))
    return found


def optimizer_config(optimizer: keras.Optimizer) -> dict[str, Any]:
    """Returns an optimizer's configuration; a learning rate schedule is included as an object.

    A schedule needs a `get_config` or a registration only if it is saved.
    """
    schedule = getattr(optimizer, "_learning_rate", None)
    if not isinstance(schedule, Schedule):
        return optimizer.get_config()
    without = object.__new__(type(optimizer))
    vars(without).update(vars(optimizer), _learning_rate=0.0)
    return {**without.get_config(), "learning_rate": schedule}


def check_fingerprint(own: Mapping[str, str], collective: Collective) -> None:
    """Compares the processes' fingerprints.

    Args:
        own: Fingerprint of this process.
        collective: Collective that gathers the fingerprints.

    Raises:
        ValueError: On every process, if they differ; it names the first difference.
    """
    text = json.dumps(own)
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest()[:8], np.int64)
    digests = collective.all_gather(tf.constant(digest), "fingerprint").numpy().tolist()
    if len(set(digests)) == 1:
        return
    by_rank = [json.loads(received) for received in gather_texts(collective, text, "fingerprint")]
    common = max(digests, key=digests.count)
    odd = next(rank for rank, digest in enumerate(digests) if digest != common)
    other = digests.index(common)
    keys = dict.fromkeys([*by_rank[other], *by_rank[odd]])
    key = next(k for k in keys if by_rank[odd].get(k) != by_rank[other].get(k))
    raise ValueError(
        f"All {collective.size} ranks must make the same call with the same model. Received for "
        f"{key}: {by_rank[odd].get(key, 'nothing')} on rank {odd}, "
        f"{by_rank[other].get(key, 'nothing')} on rank {other} (this is rank {collective.rank})."
    )


def _in_words(value: Any) -> str:
    """Returns a value as text that is the same on every process: no addresses, no data."""
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {_in_words(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_in_words, value)) + "]"
    if isinstance(value, Schedule):
        with contextlib.suppress(NotImplementedError):
            return f"{type(value).__name__} {_in_words(value.get_config())}"
    if isinstance(value, np.generic):
        return repr(value.item())
    return getattr(value, "__name__", type(value).__name__)
