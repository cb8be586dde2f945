"""Cases run by a chief: compressed gradients."""

import keras
import numpy as np
import psutil
import tensorflow as tf
from keras import layers

import tfdml
from tests.strategies.parameter_server.cases import _raised
from tfdml.strategies import ParameterServerStrategy

INPUTS, WIDTH = 512, 512
GRADIENT_BYTES = 4 * INPUTS * WIDTH
STEPS = 20


def pushed(synchronous: bool, compression: str | None, sequences: bool) -> dict:
    """Returns the bytes on the loopback per step, and the final loss.

    For sequences in batches of an unknown size, TensorFlow does not know the shape of the large
    layer's gradient when it traces the step.
    """
    shape = (2, INPUTS) if sequences else (INPUTS,)
    strategy = ParameterServerStrategy(synchronous=synchronous, compression=compression)
    with strategy.scope():
        keras.utils.set_random_seed(3)
        model = keras.Sequential(
            [layers.Input(shape), layers.Dense(WIDTH, "relu"), layers.Dense(1)]
        )
        model.compile(keras.optimizers.SGD(0.001), "mse")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(16, *shape)).astype("float32")
    data = tf.data.Dataset.from_tensors((x, x[..., :1])).repeat()
    if sequences:
        data = data.unbatch().batch(16)
    model.fit(data, steps_per_epoch=6, verbose=0)
    before = psutil.net_io_counters(pernic=True)["lo"].bytes_sent
    history = model.fit(data, steps_per_epoch=STEPS, verbose=0)
    sent = psutil.net_io_counters(pernic=True)["lo"].bytes_sent - before
    return {"bytes": sent / STEPS, "loss": history.history["loss"][-1]}


def refused(compression: str) -> str:
    """Returns the error for a codec."""
    made = {
        "power_sgd": lambda: tfdml.compression.PowerSGD(rank=2),
        "one_bit": tfdml.compression.OneBit,
        "top_k": lambda: tfdml.compression.TopK(0.1),
    }[compression]()
    return _raised(lambda: ParameterServerStrategy(compression=made))


def learned() -> dict:
    """Trains asynchronously; returns the first and the last loss, and the number of steps."""
    rounded = tfdml.compression.QSGD(bits=8, stochastic=True)
    strategy = ParameterServerStrategy(compression=rounded)
    with strategy.scope():
        keras.utils.set_random_seed(3)
        model = keras.Sequential(
            [layers.Input((64,)), layers.Dense(64, "relu"), layers.Dense(32), layers.Dense(1)]
        )
        # The worker computes norms of its own gradients.
        model.compile(keras.optimizers.Adam(0.003, global_clipnorm=1.0), "mse")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(256, 64)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(32)
    history = model.fit(data, steps_per_epoch=40, epochs=10, verbose=0)
    loss = history.history["loss"]
    return {"first": loss[0], "last": loss[-1], "steps": int(model.optimizer.iterations.numpy())}
