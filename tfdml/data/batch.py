"""What a batch for `fit` is made of: parsed features, augmented, transformed, with weights."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def finisher(
    decode: Callable,
    label: str | None,
    transform: Callable | None,
    augment: Callable | None,
    weighted: bool,
) -> Callable:
    """Returns what makes a batch for `fit` of parsed features, weights and seeds."""

    def outputs(features: dict[str, tf.Tensor]) -> tuple:
        y = (features.pop(label),) if label else ()
        x = next(iter(features.values())) if len(features) == 1 else features
        return (x, *y)

    @tf.autograph.experimental.do_not_convert
    def finish(parsed: dict[str, tf.Tensor], weights: tf.Tensor, seeds: tf.Tensor) -> Any:
        values = outputs(decode(parsed, seeds))
        if augment is not None:
            values = _tuple(augment(*values, seeds))
        if transform is not None:
            values = _tuple(transform(*values))
        if weighted:
            return (*values, weights) if len(values) > 1 else (*values, None, weights)
        return values if len(values) > 1 else values[0]

    return finish


def _tuple(values: Any) -> tuple:
    return values if isinstance(values, tuple) else (values,)
