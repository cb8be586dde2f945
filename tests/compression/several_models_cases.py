"""Several models, or optimizers, that train under one strategy with what a codec keeps of each."""

import keras
import numpy as np
from keras import layers

from tests.harness import job
from tests.strategies.cases import data
from tests.strategies.custom_cases import Adversaries
from tfdml.compression import OneBit
from tfdml.strategies.rank_state import RankState


def _model(seed: int) -> keras.Model:
    """A model whose layers, and optimizer, are called like every other one's."""
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([layers.Input((6,)), layers.Dense(400, name="hidden")])
    model.add(layers.Dense(5, name="out"))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05 * seed, momentum=0.9, name="sgd"), loss)
    return model


def in_turn(other: bool) -> list[np.ndarray]:
    """Trains a model for three epochs, in turn with another one or alone; returns its weights."""
    x, y = data(33)
    with job.strategy(compression=OneBit()).scope():
        first, second = _model(1), _model(2)
    for _ in range(3):
        first.fit(x, y, batch_size=11, shuffle=False, verbose=0)
        if other:
            second.fit(-x[:22], y[:22], batch_size=11, shuffle=False, verbose=0)
    return first.get_weights()


class LargeAdversaries(Adversaries):
    """Two networks, large enough to be compressed, whose layers are called alike."""

    def __init__(self):
        super().__init__()
        self.generator = self._network(6)
        self.critic = self._network(1)

    def _network(self, outputs: int) -> keras.Model:
        hidden = layers.Dense(400, activation="tanh", name="hidden")
        return keras.Sequential([layers.Input((6,)), hidden, layers.Dense(outputs, name="out")])


def _adversaries() -> keras.Model:
    keras.utils.clear_session()  # Names begin with no number, as in a program that starts again.
    keras.utils.set_random_seed(3)
    with job.strategy(compression=OneBit()).scope():
        model = LargeAdversaries()
        model.compile(keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.05))
        model.build((None, 6))
        for network, optimizer in (
            (model.generator, model.generator_optimizer),
            (model.critic, model.critic_optimizer),
        ):
            optimizer.build(network.trainable_variables)
    return model


def two_optimizers_go_on(interrupted: bool, as_before: bool = False) -> list[np.ndarray]:
    """Trains with two optimizers; returns the weights.

    Args:
        interrupted: Whether a second model, and strategy, goes on in the middle.
        as_before: Whether what was kept is called as in checkpoints that know one optimizer.
    """
    x, _ = data(22)
    model = _adversaries()
    model.fit(x, batch_size=11, shuffle=False, verbose=0)
    if interrupted:
        kept = RankState(model).kept()
        residuals = [name for name in kept if "residual" in name]
        assert len({name.partition("/")[0] for name in residuals}) > 1, residuals
        if as_before:
            kept = {
                name.split("optimizer_")[-1].lstrip("0123456789/"): v for name, v in kept.items()
            }
        weights, model = model.get_weights(), _adversaries()
        model.set_weights(weights)
        RankState(model).restore([kept] * job_size(model))
    model.fit(x, batch_size=11, shuffle=False, verbose=0)
    return model.get_weights()


def job_size(model: keras.Model) -> int:
    """Returns the number of ranks."""
    return model.distribute_strategy.size
