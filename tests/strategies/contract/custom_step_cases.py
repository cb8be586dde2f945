"""Cases run by ranks: training the models of `custom_steps`."""

import keras
import tensorflow as tf

from tests.harness import rank_job
from tests.strategies.cases import outcome, seed_ranks_apart
from tests.strategies.contract.custom_steps import (
    EXAMPLES,
    AddedLosses,
    DerivedLogs,
    Guide,
    data_of,
)

# Examples whose loss and metrics are passed to `compile`.
LOSSES = {
    AddedLosses: lambda y, p: keras.ops.mean(_crossentropy(y, p)),
    DerivedLogs: "sparse_categorical_crossentropy",
}


def _crossentropy(y, logits):
    return keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)


def train(
    name: str,
    rows: int = 23,
    accumulate: int | None = None,
    dtype: str = "float64",
    weighted: bool = False,
    run_eagerly: bool = False,
    **options: object,
) -> dict:
    """Trains an example; by default in float64, with a last batch that no replicas share evenly.

    Args:
        name: Name of the example.
        rows: Number of rows of the data.
        accumulate: The optimizer's `gradient_accumulation_steps`.
        dtype: Name of the policy. With float16 the loss is scaled.
        weighted: Whether the rows have weights.
        run_eagerly: As in `compile`.
        **options: Arguments of the strategy.
    """
    if dtype == "float64":
        keras.backend.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)
    example = EXAMPLES[name]
    data = data_of(example, rows)
    if dtype != "float64":
        data = tuple(d.astype("float32") if d.dtype.kind == "f" else d for d in data)
    with rank_job.strategy(**options).scope():
        seed_ranks_apart()
        model = example()
        optimizer = keras.optimizers.Adam(0.05, gradient_accumulation_steps=accumulate)
        if example in LOSSES:
            how = {"loss": LOSSES[example], "metrics": ["accuracy"]}
            model.compile(optimizer, run_eagerly=run_eagerly, **how)
        else:
            model.compile(optimizer)
            model.run_eagerly = run_eagerly
    if weighted:
        data = (*data, 1.0 + data[1])
    batches = tf.data.Dataset.from_tensor_slices(data if len(data) > 1 else data[0]).batch(8)
    history = model.fit(batches, epochs=2, verbose=0)
    found = outcome(model, history)
    if example is Guide:
        found["evaluated"] = model.evaluate(batches, verbose=0, return_dict=True)
    return found


def train_with(name: str, options: dict) -> dict:
    """Calls `train` with its options in one dictionary."""
    return train(name, **options)
