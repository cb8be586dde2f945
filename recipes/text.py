"""Trains on lines of text of any length: batches of similar length, padded only to their longest.

    python recipes/text.py make lines.jsonl
    tfdml records convert lines.jsonl -o text/ --split train=0.9,test=0.1 --shuffle 1
    horovodrun -np 2 python recipes/text.py train text/

The text is Python's standard library: which of its modules is a line from?
"""

import json
import sysconfig
from pathlib import Path
from typing import Annotated

import keras
import tensorflow as tf
import typer

import tfdml

MODULES = ("argparse", "ast", "datetime", "decimal", "inspect", "subprocess", "tarfile", "typing")
LONGEST = 100  # Characters of a line.

app = typer.Typer(help="Train on lines of text, in batches of similar length.")


@app.command()
def make(
    path: Annotated[Path, typer.Argument(help="The JSON Lines file to write.")],
    limit: Annotated[int | None, typer.Option(min=1, help="Lines of each module.")] = None,
) -> None:
    """Write lines and the numbers of their modules as JSON Lines."""
    library = Path(sysconfig.get_path("stdlib"))
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for number, module in enumerate(MODULES):
            source = library / f"{module}.py"
            if not source.exists():  # A module may have become a package.
                source = library / f"_py{module}.py"
            lines = [line.strip()[:LONGEST] for line in source.read_text().splitlines()]
            for line in [line for line in lines if len(line) > 10][:limit]:
                file.write(json.dumps({"line": line, "module": number}) + "\n")
                count += 1
    typer.echo(f"written: {path}, {count} lines of {len(MODULES)} modules")


def build_model() -> keras.Model:
    """Builds a network that pools over the characters of a line of any length."""
    return keras.Sequential(
        [
            keras.Input((None,), dtype="int32"),
            keras.layers.Embedding(256, 48),
            keras.layers.Conv1D(96, 5, padding="same", activation="relu"),
            keras.layers.GlobalMaxPooling1D(),
            keras.layers.Dense(len(MODULES)),
        ]
    )


@app.command()
def train(
    records: Annotated[Path, typer.Argument(help="What `tfdml records convert` has written.")],
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training data.")] = 5,
    batch_size: Annotated[int, typer.Option(min=1, help="Lines of a global batch.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights and the order.")] = 0,
) -> None:
    """Train on the converted lines, on one process or on many."""
    keras.utils.set_random_seed(seed)
    strategy = tfdml.HorovodStrategy()

    def padded(line, module):
        codes = tf.strings.unicode_decode(line, "UTF-8")
        return tf.minimum(codes.to_tensor(), 255), module

    options = {"label": "module", "features": ["line"], "transform": padded}
    read = tfdml.data.read_tfrecords
    with strategy.scope():
        training = read(
            str(records), batch_size, "train", seed=seed, bucket_by_length=True, **options
        )
        test = read(str(records), batch_size, "test", shuffle=False, **options)
        model = build_model()
        model.compile(
            optimizer=keras.optimizers.Adam(2e-3),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    history = model.fit(
        training, epochs=epochs, validation_data=test, callbacks=[training.callback()], verbose=2
    ).history
    if strategy.is_chief:
        typer.echo(
            f"test: accuracy {history['val_accuracy'][-1]:.3f}, {1 / len(MODULES):.3f} by guessing"
        )


if __name__ == "__main__":
    app()
