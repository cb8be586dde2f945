"""Data under parameter servers, sent to the workers once or read by the chief."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TFEpochIterator
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.epoch_iterator import EpochIterator

from tfdml.collectives.collective import LocalCollective
from tfdml.strategies.keras_seam.calls import Call
from tfdml.strategies.keras_seam.data.array_data import ArrayOrder, agreed_seed, array_batches
from tfdml.strategies.parameter_server.remote_datasets import (
    ShippedDataset,
    as_dataset,
    on_renamed_device,
)


def set_up(
    call: Call,
    iterator: TFEpochIterator,
    strategy: tf.distribute.Strategy,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Initializes Keras's iterator over data that the workers or the chief read.

    Args:
        call: The call that sets up the data.
        iterator: Keras's iterator, to be initialized.
        strategy: The strategy.
        *args: Other positional arguments of Keras's call.
        **kwargs: Keyword arguments of Keras's call; the data are `x`.
    """
    model, trains = call.model, call.trains
    call.trains = False
    iterator._distribute_strategy, iterator._tfdml_model = strategy, model
    reads_remotely = trains and not strategy.synchronous
    source = kwargs.get("x")
    if not (reads_remotely and callable(source)):
        kwargs["x"] = as_dataset(source)
        EpochIterator.__init__(iterator, *args, **kwargs)
        source = _dataset_of(call, iterator.data_adapter, shuffled_by_us=not reads_remotely)
    if reads_remotely:
        steps = kwargs.get("steps_per_epoch")
        if isinstance(getattr(iterator, "data_adapter", None), ArrayDataAdapter):
            steps = steps or iterator.data_adapter.num_batches
        _read_remotely(iterator, source, steps, kwargs.get("steps_per_execution", 1), strategy)
    elif call.name == "predict":
        model.make_predict_function()
        iterator._distributed_dataset = _Ahead(on_renamed_device(source), model)
    else:
        iterator._distributed_dataset = on_renamed_device(source)


def model_of(iterator: TFEpochIterator) -> keras.Model | None:
    """Returns the model for which `set_up` made an iterator, or None if it did not."""
    return getattr(iterator, "_tfdml_model", None)


def _read_remotely(
    iterator: TFEpochIterator, source: Any, steps, steps_per_execution, strategy
) -> None:
    iterator._distributed_dataset = ShippedDataset(source, strategy.coordinator, strategy.size)
    iterator.data_adapter = _Unlimited()
    iterator.steps_per_epoch, iterator.steps_per_execution = steps, steps_per_execution
    iterator._num_batches = iterator._current_iterator = iterator._epoch_iterator = None
    iterator._steps_seen = 0


def _dataset_of(call: Call, adapter: DataAdapter, shuffled_by_us: bool) -> tf.data.Dataset:
    if shuffled_by_us and isinstance(adapter, ArrayDataAdapter):
        # As under the other strategies, the order depends only on Keras's seed.
        def seed() -> int | None:
            return agreed_seed(LocalCollective()) if adapter._shuffle else None

        found = call.position
        order = ArrayOrder(seed()) if found is None else found.array_order(seed)
        return array_batches(adapter, order, None)
    # An order that is counted in Python cannot be sent to workers.
    with call.overriding(position=None):
        return adapter.get_tf_dataset()


class _Ahead:
    """Iterable of `predict` batches that are sent to the workers ahead of their turn.

    Args:
        dataset: The batches.
        model: The model.
    """

    def __init__(self, dataset: tf.data.Dataset, model: keras.Model):
        self._dataset = dataset
        self._model = model

    def __iter__(self) -> Iterator:
        return self._model.predict_function.ahead(self._dataset)


class _Unlimited(DataAdapter):
    """Adapter of data that workers read themselves."""

    @property
    def num_batches(self) -> None:
        """None, because the data do not end."""
