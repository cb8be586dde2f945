"""What a batch for `fit` is made of: parsed features, augmented, transformed, with weights."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdml.data.read_options import ReadOptions


def finisher(decode: Callable, options: ReadOptions) -> Callable:
    """Returns what makes a batch for `fit` of parsed features, weights and seeds.

    Args:
        decode: See `parsing.decoder`.
        options: Which feature is the label, what changes batches, and whether they have weights.
    """

    def outputs(features: dict[str, tf.Tensor]) -> tuple:
        y = (features.pop(options.label),) if options.label else ()
        x = next(iter(features.values())) if len(features) == 1 else features
        return (x, *y)

    @tf.autograph.experimental.do_not_convert
    def finish(parsed: dict[str, tf.Tensor], weights: tf.Tensor, seeds: tf.Tensor) -> Any:
        values = outputs(decode(parsed, seeds))
        if options.augment is not None:
            values = _tuple(options.augment(*values, seeds))
        if options.transform is not None:
            values = _tuple(options.transform(*values))
        if options.weighted:
            return (*values, weights) if len(values) > 1 else (*values, None, weights)
        return values if len(values) > 1 else values[0]

    return finish


def _tuple(values: Any) -> tuple:
    return values if isinstance(values, tuple) else (values,)
