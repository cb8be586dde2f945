"""Cases run by ranks: Python's stack at the exchange of gradients, and at the update."""

import sys
import traceback
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

import keras
import tensorflow as tf
from keras import layers

import tfdml
from tests.harness import rank_job
from tests.strategies.cases import data
from tfdml.collectives.horovod import HorovodCollective

ROOT = Path(tfdml.__file__).parent


def _files_since_train_step() -> list[str]:
    """Returns tfdml's files on the stack from `train_step` inwards, each as often as entered.

    Replicas run in threads, and meet in another thread: the path leads through both.
    """
    stacks = [traceback.extract_stack(frame) for frame in sys._current_frames().values()]
    (replica,) = [s for s in stacks if any(f.name == "train_step" for f in s)]
    way = _entered(_behind(replica, lambda frame: frame.name == "train_step"))
    own = traceback.extract_stack()[:-1]
    if not any(frame.name == "train_step" for frame in own):
        # Below it is the code that started the replicas' threads.
        met = _entered(_behind(own, lambda frame: frame.filename.endswith("mirrored_run.py")))
        # `merge_call` calls its argument in the frame in which it was called.
        way += met[1:] if met[0] == way[-1] else met
    return way


def _entered(frames: Sequence[traceback.FrameSummary]) -> list[str]:
    """Returns tfdml's files in the order in which frames enter them.

    A file that another package's function calls back counts again.
    """
    files = [Path(file) for file, _ in groupby(frame.filename for frame in frames)]
    return [str(file.relative_to(ROOT)) for file in files if file.is_relative_to(ROOT)]


def _behind(stack: Sequence, condition: Callable) -> list[traceback.FrameSummary]:
    """Returns the frames called from the last frame that fulfils a condition."""
    last = max(i for i, frame in enumerate(stack) if condition(frame))
    return list(stack)[last + 1 :]


class Watched(keras.optimizers.Adam):
    """Adam that records the path to its update."""

    ways: list[list[str]] = []

    def update_step(self, gradient, variable, learning_rate):
        """Records the path, and updates."""
        self.ways.append(_files_since_train_step())
        super().update_step(gradient, variable, learning_rate)


def ways() -> dict[str, list[list[str]]]:
    """Returns the paths to the exchange of a QSGD step, and to its update."""
    exchanges: list[list[str]] = []

    def noting(original: Callable) -> Callable:
        def all_to_all(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
            exchanges.append(_files_since_train_step())
            return original(self, tensor, name)

        return all_to_all

    x, y = data(24)
    original = HorovodCollective.all_to_all
    HorovodCollective.all_to_all = noting(original)
    Watched.ways = []
    try:
        with rank_job.strategy(compression="qsgd").scope():
            model = keras.Sequential([layers.Input((6,)), layers.Dense(400), layers.Dense(3)])
            model.compile(Watched(0.01), "mse")
        model.fit(x, keras.utils.to_categorical(y, 3), batch_size=12, verbose=0)
    finally:
        HorovodCollective.all_to_all = original
    return {"exchange": exchanges, "update": Watched.ways}
