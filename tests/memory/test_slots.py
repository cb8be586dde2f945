"""Checks estimates of an optimizer's slots against those of the built optimizer."""

import keras
import pytest
import tensorflow as tf

import tfdml
from tests.memory.networks import SCALARS, network, of
from tfdml.tensor_memory.graph_nodes import nbytes_of

OPTIMIZERS = (
    "SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Adafactor", "Nadam",
    "Ftrl", "Lion", "Lamb", "Muon",
)  # fmt: skip
MAKE = {name: lambda name=name: getattr(keras.optimizers, name)() for name in OPTIMIZERS}
MAKE |= {
    "momentum": lambda: keras.optimizers.SGD(momentum=0.9, nesterov=True),
    "amsgrad, averages": lambda: keras.optimizers.Adam(amsgrad=True, use_ema=True),
    "accumulation": lambda: keras.optimizers.Adam(gradient_accumulation_steps=3),
    "LARS": lambda: tfdml.optimizers.LARS(0.1),
    "LAMB": lambda: tfdml.optimizers.LAMB(0.1),
    "RowWiseAdagrad": lambda: tfdml.optimizers.RowWiseAdagrad(0.1),
    "LazyAdam": lambda: tfdml.optimizers.LazyAdam(0.1),
}


# By default those with slots of their own kind; the others are slow tests.
BY_DEFAULT = {
    "RowWiseAdagrad",
    "SGD",
    "Adam",
    "Adafactor",
    "Muon",
    "amsgrad, averages",
    "accumulation",
}


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name, marks=() if name in BY_DEFAULT else pytest.mark.slow)
        for name, make in MAKE.items()
    ],
)
def test_slots_are_those_of_the_built_optimizer(make):
    optimizer = make()
    model = network(optimizer)
    estimated = of(model)
    assert not optimizer.built, "The estimate must leave the optimizer as it was."
    optimizer.build(model.trainable_variables)
    assert estimated.slots == sum(nbytes_of(v) for v in optimizer.variables)


@pytest.mark.parametrize(("method", "copies"), [("LocalSGD", 1), ("DiLoCo", 2)])
def test_local_updates_keep_the_last_common_weights(method, copies):
    """And, with DiLoCo's default, as much momentum."""
    model = network(MAKE["Adam"]())
    weights = sum(nbytes_of(v) for v in model.trainable_variables)
    local_updates = getattr(tfdml.local_updates, method)()
    strategy = tfdml.HorovodStrategy(local_updates=local_updates)
    plain = tfdml.estimate_memory(model, 8, ranks=[2])
    local = tfdml.estimate_memory(model, 8, strategy, ranks=[2])
    assert local.choices[0].slots - plain.choices[0].slots == copies * weights
    assert not any(choice.sharding for choice in local.choices)


def test_every_optimizer_of_keras_is_here():
    found = {
        name
        for name, value in vars(keras.optimizers).items()
        if isinstance(value, type) and issubclass(value, keras.Optimizer)
    }
    # The base class, the loss scale, and one that is made of others or not in all versions.
    others = {"Optimizer", "LossScaleOptimizer", "MultiOptimizer", "ScheduleFreeAdamW"}
    assert found - others == set(OPTIMIZERS)


def test_slots_are_not_allocated():
    """A slot of 4 GB would be seen; the variables have 40 KB."""
    taken = []

    class Greedy(keras.optimizers.SGD):
        def build(self, variables):
            super().build(variables)

            def fill(shape, dtype=None):
                taken.append(tf.executing_eagerly())
                return tf.zeros(shape, dtype)

            self.add_variable((1000, 1000, 1000), fill, "float32", name="huge")

    found = of(network(Greedy()))
    assert found.slots == 4 * 10**9 + SCALARS
    assert not any(taken)
