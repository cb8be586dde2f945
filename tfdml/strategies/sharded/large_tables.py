"""Which embedding tables are divided among the ranks, and what a table must not have for that."""

import math
from typing import Any

import keras
import tensorflow as tf


def is_large(layer: keras.layers.Embedding, least: int) -> bool:
    """Returns whether a layer's whole table has at least so many bytes."""
    numbers = math.prod((layer.input_dim, layer.output_dim))
    return numbers * tf.as_dtype(layer.variable_dtype).size >= least


def needs_of_whole_table(layer: keras.layers.Embedding) -> dict[str, Any]:
    """Returns the layer's arguments that work on its whole table in every step, with their values.

    Such a table cannot be divided.
    """
    found = {
        "embeddings_regularizer": layer.embeddings_regularizer,
        "embeddings_constraint": layer.embeddings_constraint,
        "lora_rank": layer.lora_rank,
        "quantization_config": layer.quantization_config or layer.quantization_mode,
    }
    return {name: value for name, value in found.items() if value is not None}
