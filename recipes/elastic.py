"""Trains on machines that come and go: the remaining ones continue in memory, new ones join.

    horovodrun -np 1 --min-np 1 --max-np 2 --host-discovery-script ./hosts.sh
        --network-interface lo --gloo-timeout-seconds 120 python recipes/elastic.py

`hosts.sh` is your script that prints the available machines, one `name:slots` per line;
`horovodrun` runs it every second. To try it here: let it print a file with the line `localhost:1`,
and add a line `127.0.0.1:1` while this trains: a second process joins. Kill that one, and the first
continues. On several machines leave out `--network-interface lo`. The timeout is how long the
others wait for a new process to start and import TensorFlow. If all ranks are lost, the same
command resumes from the checkpoint on disk.
"""

import keras
import typer
from sklearn.datasets import load_digits

import tfdml


def main(epochs: int = 50, batch_size: int = 60, directory: str = "elastic_run") -> None:
    """Trains on scikit-learn's digits while ranks come and go.

    Args:
        epochs: Number of epochs.
        batch_size: Rows of a global batch, the same for any number of ranks.
        directory: Directory of the checkpoints.
    """
    keras.utils.set_random_seed(1)
    strategy = tfdml.HorovodStrategy()
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"])
    digits = load_digits()
    x, y = (digits.data / 16).astype("float32"), digits.target

    @tfdml.elastic.run
    def train(state):
        print(f"rank {strategy.rank} of {strategy.size} trains", flush=True)
        # A lost rank costs at most 10 steps; residuals, history and data position are restored too.
        saved = tfdml.callbacks.FaultTolerantCheckpoint(directory, save_freq=100)
        callbacks = [state.committer(steps=10, checkpoint=saved)]
        return model.fit(x, y, batch_size=batch_size, epochs=epochs, verbose=2, callbacks=callbacks)

    history = train(tfdml.elastic.KerasState(model)).history
    if strategy.is_chief:
        print(f"accuracy {history['accuracy'][-1]:.4f} after {len(history['loss'])} epochs")


if __name__ == "__main__":
    typer.run(main)
