"""Cases run by ranks: several models or optimizers under one strategy with codec state."""

import keras
import numpy as np
from keras import layers

from tests.harness import rank_job
from tests.strategies.cases import data
from tests.strategies.contract.custom_cases import Adversaries
from tfdml.callbacks import GradientNoiseScale, StepMonitor
from tfdml.compression import OneBit, PowerSGD
from tfdml.strategies.fit_session import get_session
from tfdml.strategies.observers.noise_scale import NoiseScale
from tfdml.strategies.observers.step_clock import StepClock
from tfdml.strategies.replicas.rank_state import RankState

CODECS = {"OneBit": OneBit(), "PowerSGD": PowerSGD(2)}


def _model(seed: int, accumulation: int | None = None) -> keras.Model:
    """Returns a model whose layers and optimizer have the same names as every other model's."""
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([layers.Input((6,)), layers.Dense(400, name="hidden")], name="model")
    model.add(layers.Dense(5, name="out"))
    optimizer = keras.optimizers.SGD(
        0.05 * seed, momentum=0.9, name="sgd", gradient_accumulation_steps=accumulation
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss)
    return model


def _fit(model: keras.Model, *callbacks: keras.callbacks.Callback) -> None:
    """Trains for three steps: an odd number leaves an accumulation over two unfinished."""
    x, y = data(33)
    model.fit(x, y, batch_size=11, shuffle=False, verbose=0, callbacks=list(callbacks))


def in_turn(
    other: bool, codec: str = "OneBit", accumulation: int | None = None, resumed: bool = False
) -> list[np.ndarray]:
    """Trains a model for four epochs, alternating with another one or alone; returns its weights.

    Args:
        other: Whether another model is trained in between.
        codec: Codec of the strategy.
        accumulation: Number of steps after which the optimizers update.
        resumed: Whether the last epoch is run by a new model that has restored the state.
    """
    x, y = data(33)
    strategy = rank_job.strategy(compression=CODECS[codec])
    with strategy.scope():
        first, second = _model(1, accumulation), _model(2, accumulation)
    for _ in range(3):
        _fit(first)
        if other:
            second.fit(-x[:22], y[:22], batch_size=11, shuffle=False, verbose=0)
    if resumed:
        first = _taken_up(first, codec, accumulation)
    _fit(first)
    return first.get_weights()


def _taken_up(model: keras.Model, codec: str, accumulation: int | None) -> keras.Model:
    """Returns a model under a new strategy that has restored another model's state."""
    values = [v.numpy() for v in [*model.variables, *model.optimizer.variables]]
    saved_state = RankState(model).local_state()
    assert any("gathered" in name for name in saved_state) == bool(accumulation)
    with rank_job.strategy(compression=CODECS[codec]).scope():
        model = _model(1, accumulation)
        model.optimizer.build(model.trainable_variables)
        for variable, value in zip(
            [*model.variables, *model.optimizer.variables], values, strict=True
        ):
            variable.assign(value)
    model.make_train_function()
    RankState(model).restore([saved_state] * job_size(model))
    return model


def watched(late: bool) -> list[np.ndarray]:
    """Accumulates gradients while observers are added; returns the weights.

    Args:
        late: Whether observers are added in the middle of an accumulation instead of before it.
    """
    with rank_job.strategy(compression=OneBit()).scope():
        model, other = _model(1, 2), _model(2, 2)
    observers = [StepMonitor(), GradientNoiseScale()]
    for epoch in range(3):
        _fit(model, *(observers if epoch or not late else []))
    # They belong to the model only.
    _fit(other)
    assert get_session(other).observers == []
    assert {type(o) for o in get_session(model).observers} == {StepClock, NoiseScale}
    assert observers[1].estimate().steps == (3 if late else 4)
    return model.get_weights()


def compiled_again() -> list[np.ndarray]:
    """Compiles in mid-accumulation: no state of the previous optimizer may remain."""
    with rank_job.strategy(compression=OneBit()).scope():
        model = _model(1, 2)
    _fit(model)
    model.compile(keras.optimizers.SGD(0.05, name="sgd"), model.loss)
    _fit(model)
    assert get_session(model).accumulator is None
    names = [name for name in RankState(model).local_state() if "gathered" in name]
    assert names == []
    return model.get_weights()


def compiled_once() -> list[np.ndarray]:
    """Runs only the second part of `compiled_again`."""
    with rank_job.strategy(compression=OneBit()).scope():
        before, model = _model(1, 2), _model(1)
    _fit(before)
    model.set_weights(before.get_weights())
    model.compile(keras.optimizers.SGD(0.05, name="sgd"), model.loss)
    _fit(model)
    return model.get_weights()


class LargeAdversaries(Adversaries):
    """Two networks, large enough to be compressed, whose layers have the same names."""

    def __init__(self):
        super().__init__()
        self.generator = self._network(6)
        self.critic = self._network(1)

    def _network(self, outputs: int) -> keras.Model:
        hidden = layers.Dense(400, activation="tanh", name="hidden")
        return keras.Sequential([layers.Input((6,)), hidden, layers.Dense(outputs, name="out")])


def _adversaries() -> keras.Model:
    keras.utils.clear_session()  # Names start without a number, as in a restarted program.
    keras.utils.set_random_seed(3)
    with rank_job.strategy(compression=OneBit()).scope():
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
        interrupted: Whether a second model under a new strategy resumes in the middle.
        as_before: Whether the state has the names of checkpoints that know only one optimizer.
    """
    x, _ = data(22)
    model = _adversaries()
    model.fit(x, batch_size=11, shuffle=False, verbose=0)
    if interrupted:
        saved_state = RankState(model).local_state()
        residuals = [name for name in saved_state if "residual" in name]
        assert len({name.partition("/")[0] for name in residuals}) > 1, residuals
        if as_before:
            saved_state = {
                name.split("optimizer_")[-1].lstrip("0123456789/"): v
                for name, v in saved_state.items()
            }
        weights, model = model.get_weights(), _adversaries()
        model.set_weights(weights)
        RankState(model).restore([saved_state] * job_size(model))
    model.fit(x, batch_size=11, shuffle=False, verbose=0)
    return model.get_weights()


def job_size(model: keras.Model) -> int:
    """Returns the number of ranks."""
    return model.distribute_strategy.size
