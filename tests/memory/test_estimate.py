"""Checks that an estimate leaves training as it was, and what it refuses."""

import keras
import numpy as np
import pytest

import tfdml
from tests.memory.networks import WIDTH, network, of


def test_training_is_not_changed():
    def losses(estimate: bool) -> list[float]:
        keras.utils.set_random_seed(1)
        model = network(keras.optimizers.Adam(0.01))
        if estimate:
            tfdml.estimate_memory(model, 16)
        x = np.random.default_rng(0).normal(size=(64, WIDTH)).astype("float32")
        return model.fit(x, x[:, :1], epochs=2, verbose=0, shuffle=False).history["loss"]

    assert losses(True) == losses(False)


def test_wrong_arguments():
    model = network()
    in_stages = tfdml.MirroredStrategy([["CPU:0"]], pipeline=tfdml.PipelineParallel())
    for arguments, message in (
        ((object(), 1), "`model` must be a keras.Model"),
        ((model, 0), "`batch_size` must be a positive number"),
        ((model, True), "`batch_size` must be a positive number"),
        ((model, 1, "horovod"), "`strategy` must be a synchronous strategy"),
        ((model, 1, in_stages), "`strategy` must not have a `pipeline`"),
    ):
        with pytest.raises(ValueError, match=message):
            tfdml.estimate_memory(*arguments)
    with pytest.raises(ValueError, match="`ranks` must be positive numbers"):
        tfdml.estimate_memory(model, 1, ranks=[0])


def test_a_model_that_is_not_ready():
    bare = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="must be compiled with an optimizer"):
        tfdml.estimate_memory(bare, 1)
    unbuilt = keras.Sequential([keras.layers.Dense(1)])
    unbuilt.compile("sgd", "mse")
    with pytest.raises(ValueError, match="must be built"):
        tfdml.estimate_memory(unbuilt, 1)


def test_data_that_the_step_does_not_take():
    with pytest.raises(ValueError, match=r"`data` must be a batch that `Sequential.train_step`"):
        of(network(), data=(np.zeros((1, WIDTH + 1), "float32"), np.zeros((1, 1), "float32")))


def test_an_optimizer_that_cannot_be_copied():
    class Odd(keras.optimizers.SGD):
        def __init__(self, needed):
            super().__init__()

    with pytest.raises(ValueError, match="from_config.*Odd"):
        of(network(Odd(1)))
