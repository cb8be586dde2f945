"""Job of `tools.bench.robust`: trains 25 workers under one attack, by tfdml's and ByzFL's rules.

    .venv-byzfl/bin/python -m tools.bench.robust.job ALIE 200

tfdml trains 25 logical devices of one `MirroredStrategy`. For ByzFL's rules this process plays all
workers in turn. Weights, batches and attacks are the same. Attackers know the honest gradients of
the step, and send a wrong gradient in their place, which their momentum averages.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import tfdml
from tools.bench.harness import check_choice, report, start
from tools.bench.robust.attacks import ATTACKS, HONEST, WORKERS, Known, wrong_gradient
from tools.bench.robust.byzfl_rules import import_rules

if TYPE_CHECKING:
    import images

BATCH, RATE, RADIUS, ITERATIONS, MOMENTUM = 32, 0.01, 10.0, 3, 0.9
WRONG = WORKERS - HONEST


def batches_of_workers(labels: np.ndarray, steps: int) -> np.ndarray:
    """Returns the images that each worker has in each step: `[steps, workers * BATCH]`.

    Honest workers have the images in the order of their classes, so each has one or two classes;
    wrong ones have images of all classes.
    """
    rng = np.random.default_rng(0)
    parts = np.array_split(np.argsort(labels, kind="stable"), HONEST)
    parts += [rng.permutation(len(labels)) for _ in range(WRONG)]
    chosen = [rng.choice(part, (steps, BATCH)) for part in parts]
    return np.concatenate(chosen, 1)


def layers() -> list[keras.layers.Layer]:
    """Returns the layers of a small convolutional network."""
    keras.utils.set_random_seed(0)
    convolution = {"kernel_size": 3, "strides": 2, "activation": "relu"}
    return [
        keras.layers.Input((28, 28, 1)),
        keras.layers.Conv2D(8, **convolution),
        keras.layers.Conv2D(16, **convolution),
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10),
    ]


class Attacked(keras.Sequential):
    """Model whose last replicas send wrong gradients.

    Args:
        attack: Name of the attack.
    """

    def __init__(self, attack: str):
        super().__init__(layers())
        self.attack = attack

    def train_step(self, data):
        """Takes a step on a replica's rows."""
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        own = tape.gradient(loss, self.trainable_variables)
        replica = tf.distribute.get_replica_context()
        number = tf.convert_to_tensor(replica.replica_id_in_sync_group)

        def total(values: list, which: tf.Tensor) -> list:
            chosen = [value * tf.cast(which, value.dtype) for value in values]
            return replica.all_reduce(tf.distribute.ReduceOp.SUM, chosen)

        is_honest = number < HONEST
        known = Known(
            [t / HONEST for t in total(own, is_honest)],
            [t / HONEST for t in total([g * g for g in own], is_honest)],
            total(own, number == 0),
        )
        wrong = wrong_gradient(self.attack, own, known, tf.sqrt, tf.maximum)
        sent = [tf.where(is_honest, a, b) for a, b in zip(own, wrong, strict=True)]
        self.optimizer.apply(sent, self.trainable_variables)
        return {"loss": loss}


class Data(NamedTuple):
    """Images, and what the workers have of them.

    Attributes:
        dataset: The images.
        chosen: Indices of the images of each step: `[steps, workers * BATCH]`.
        labels: Their labels, of which those of wrong workers may be wrong.
    """

    dataset: "images.Images"
    chosen: np.ndarray
    labels: np.ndarray


def by_tfdml(
    rule: tfdml.aggregation.RobustRule | None, rate: float, attack: str, data: Data
) -> float:
    """Returns the accuracy after training by one of tfdml's rules."""
    strategy = tfdml.MirroredStrategy(
        [f"CPU:{i}" for i in range(WORKERS)], gradient_aggregation=rule
    )
    with strategy.scope():
        model = Attacked(attack)
        model.compile(keras.optimizers.SGD(rate), _loss(), metrics=["accuracy"])
    x = tf.constant(data.dataset.x)
    batches = tf.data.Dataset.from_tensor_slices((data.chosen, data.labels))
    model.fit(batches.map(lambda i, y: (tf.gather(x, i), y)), epochs=1, verbose=0)
    return _accuracy(model, data.dataset)


def by_byzfl(rule: Callable, momentum: float, rate: float, attack: str, data: Data) -> float:
    """Returns the accuracy after training by one of ByzFL's rules, all workers in turn."""
    with tfdml.alone():
        model, loss = keras.Sequential(layers()), _loss()
    weights = model.trainable_variables

    @tf.function
    def gradient(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        return tf.concat([tf.reshape(g, [-1]) for g in tape.gradient(value, weights)], 0)

    averages = 0.0
    sizes = np.cumsum([int(np.prod(w.shape)) for w in weights])[:-1]
    for chosen, labels in zip(data.chosen, data.labels, strict=True):
        x, y = data.dataset.x[chosen], labels
        rows = [slice(i * BATCH, (i + 1) * BATCH) for i in range(WORKERS)]
        own = np.stack([gradient(tf.constant(x[r]), tf.constant(y[r])).numpy() for r in rows])
        honest = own[:HONEST]
        known = Known([honest.mean(0)], [(honest**2).mean(0)], [own[0]])
        for worker in range(HONEST, WORKERS):
            (own[worker],) = wrong_gradient(attack, [own[worker]], known, np.sqrt, np.maximum)
        averages = momentum * averages + (1 - momentum) * own
        step = np.asarray(rule(averages), np.float32)
        for weight, part in zip(weights, np.split(step, sizes), strict=True):
            weight.assign_sub(rate * part.reshape(weight.shape))
    return _accuracy(model, data.dataset)


def _loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _accuracy(model: keras.Model, dataset: "images.Images") -> float:
    outputs = model.predict(dataset.x_val, batch_size=2500, verbose=0)
    return float(np.mean(outputs.argmax(1) == dataset.y_val))


def main(attack: str, steps: int) -> None:
    """Trains by each rule; reports the accuracies by rule, for tfdml and ByzFL.

    Args:
        attack: Name of the attack.
        steps: Number of steps.
    """
    check_choice("attack", [attack], ATTACKS)
    cpu = tf.config.list_physical_devices("CPU")[0]
    devices = [tf.config.LogicalDeviceConfiguration()] * WORKERS
    tf.config.set_logical_device_configuration(cpu, devices)
    import images

    dataset, rules = images.load(), import_rules()
    chosen = batches_of_workers(dataset.y, steps)
    y = dataset.y[chosen]
    if attack == "label flip":
        y[:, HONEST * BATCH :] = 9 - y[:, HONEST * BATCH :]
    data = Data(dataset, chosen, y)
    # An average of gradients is as long as one gradient; the cited sum is ten times as long.
    with_momentum = {"momentum": MOMENTUM, "rate": RATE / (1 - MOMENTUM)}
    radius = RADIUS * (1 - MOMENTUM)
    clipping = tfdml.aggregation.CenteredClipping(radius, MOMENTUM, ITERATIONS)
    found = {
        ("tfdml", "mean"): by_tfdml(None, with_momentum["rate"], attack, data),
        ("tfdml", "centered clipping"): by_tfdml(clipping, with_momentum["rate"], attack, data),
    }
    for name, rule in {
        "centered clipping": rules.CenteredClipping(L=ITERATIONS, tau=radius),
        "median": rules.Median(),
        "Krum": rules.Krum(f=WRONG),
    }.items():
        found["ByzFL", name] = by_byzfl(rule, **with_momentum, attack=attack, data=data)
    plain = rules.CenteredClipping(L=ITERATIONS, tau=RADIUS)
    found["ByzFL", "centered clipping, no momentum"] = by_byzfl(plain, 0.0, RATE, attack, data)
    report([[*of, accuracy] for of, accuracy in found.items()])


if __name__ == "__main__":
    start(__doc__, main)
