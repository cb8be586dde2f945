"""Assembly of batches for `fit`: parsed features, decoded, augmented, transformed and weighted."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdml.data.read.read_options import ReadOptions


def finisher(decode: Callable, options: ReadOptions) -> Callable:
    """Returns a function that makes a batch for `fit` from parsed features, weights and seeds.

    Args:
        decode: Function that `parsing.decoder` returned.
        options: Options with the label, the functions that change batches, and whether batches have
            weights.
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
