"""Ray's datasets as data of `fit`."""

from collections.abc import Sequence
from typing import Any

import ray.train
import tensorflow as tf


def read_shard(
    name: str,
    feature_columns: str | Sequence[str],
    label_columns: str | Sequence[str],
    batch_size: int,
    **options: Any,
) -> tf.data.Dataset:
    """Returns this worker's part of a dataset of the `KerasTrainer`, for `fit` or `evaluate`.

    Args:
        name: Name in the trainer's `datasets`.
        feature_columns: Columns of the model's input: one is a tensor, several are a dict.
        label_columns: The same of the labels.
        batch_size: Rows of a global batch, of which each worker reads its share from its own part.
            A worker whose part ends early takes part without rows.
        **options: Other arguments of Ray's `DataIterator.to_tf`, such as `additional_columns`.
    """
    rows = ray.train.get_dataset_shard(name).to_tf(
        feature_columns, label_columns, batch_size=batch_size, **options
    )
    # The strategy asks for the size of the last `batch`; Ray's dataset, a generator, has none.
    own_part = tf.data.Options()
    own_part.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return rows.unbatch().batch(batch_size).with_options(own_part)
