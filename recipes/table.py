"""Trains on a table: Parquet to TFRecords, with classes drawn equally often.

    python recipes/table.py make table/
    tfdml records convert table/cancer.parquet -o table/records --split train=0.8,test=0.2
    horovodrun -np 2 python recipes/table.py train table/records

The table is scikit-learn's bundled breast cancer data: 569 tumours, 30 measurements each.
"""

from pathlib import Path
from typing import Annotated

import keras
import pyarrow
import pyarrow.parquet
import tensorflow as tf
import typer

import tfdml

app = typer.Typer(help="Train on a table: Parquet to TFRecords, with classes balanced.")


@app.command()
def make(directory: Annotated[Path, typer.Argument(help="Where to write cancer.parquet.")]) -> None:
    """Write the table as a Parquet file."""
    from sklearn.datasets import load_breast_cancer

    frame = load_breast_cancer()
    columns = {"benign": frame.target, "measured": list(frame.data.astype("float32"))}
    directory.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), directory / "cancer.parquet")
    typer.echo(f"written: {directory / 'cancer.parquet'}, {len(frame.target)} rows")


def build_model(measured: tf.data.Dataset) -> keras.Model:
    """Builds the network.

    Args:
        measured: Measurements of the training data, used to normalize the inputs.
    """
    scale = keras.layers.Normalization()
    scale.adapt(measured)
    return keras.Sequential(
        [
            keras.Input((30,)),
            scale,
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dense(1),
        ]
    )


@app.command()
def train(
    records: Annotated[Path, typer.Argument(help="What `tfdml records convert` has written.")],
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training data.")] = 20,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of a global batch.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights and the order.")] = 0,
) -> None:
    """Train on the converted table, on one process or on many."""
    keras.utils.set_random_seed(seed)
    strategy = tfdml.HorovodStrategy()
    # A list of any length is a ragged tensor: here all have 30 numbers.
    options = {
        "label": "benign",
        "features": ["measured"],
        "transform": lambda x, y: (x.to_tensor(shape=(None, 30)), y),
    }
    read = tfdml.data.read_tfrecords
    with strategy.scope():
        training = read(str(records), batch_size, "train", seed=seed, balance="benign", **options)
        test = read(str(records), batch_size, "test", shuffle=False, **options)
    # Outside of the scope every process reads all rows: the scaling is the same everywhere.
    everything = read(str(records), batch_size, "train", shuffle=False, **options)
    with strategy.scope():
        model = build_model(everything.map(lambda x, y: x))
        model.compile(
            optimizer=keras.optimizers.Adam(1e-2),
            loss=keras.losses.BinaryCrossentropy(from_logits=True),
            metrics=[keras.metrics.BinaryAccuracy(threshold=0.0), keras.metrics.AUC(name="auc")],
        )
    history = model.fit(
        training, epochs=epochs, validation_data=test, callbacks=[training.callback()], verbose=2
    ).history
    if strategy.is_chief:
        typer.echo(
            f"test: accuracy {history['val_binary_accuracy'][-1]:.3f}, "
            f"area under the curve {history['val_auc'][-1]:.3f}"
        )


if __name__ == "__main__":
    app()
