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
# Of this many last steps, each of this many is evaluated.
LAST, EVERY = 100, 20


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
    """Returns the layers of a network with one hidden layer.

    A convolutional one, tried with a radius of 1, amplified rounding until it decided the result.
    """
    keras.utils.set_random_seed(0)
    return [
        keras.layers.Input((28, 28, 1)),
        keras.layers.Flatten(),
        keras.layers.Dense(32, activation="relu"),
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
        flat = tf.concat([tf.reshape(gradient, [-1]) for gradient in own], 0)
        replica = tf.distribute.get_replica_context()
        number = tf.convert_to_tensor(replica.replica_id_in_sync_group)
        # One sum for all that attackers know, because each takes long to trace.
        honest = tf.cast(number < HONEST, flat.dtype)
        first = tf.cast(number == 0, flat.dtype)
        parts = tf.stack([flat * honest / HONEST, flat**2 * honest / HONEST, flat * first])
        known = Known(*([row] for row in tf.unstack(replica.all_reduce("sum", parts))))
        (wrong,) = wrong_gradient(self.attack, [flat], known, tf.sqrt, tf.maximum)
        pieces = tf.split(tf.where(number < HONEST, flat, wrong), [tf.size(g) for g in own])
        sent = [tf.reshape(piece, g.shape) for piece, g in zip(pieces, own, strict=True)]
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


class Accuracy:
    """Accuracy on the validation images, averaged over the last steps, of which each differs.

    Args:
        dataset: The images.
        steps: Number of steps of the training.
    """

    def __init__(self, dataset: "images.Images", steps: int):
        self._x, self._y, self._steps = dataset.x_val, dataset.y_val, steps
        with tfdml.alone():
            self._model = keras.Sequential(layers())
        self._found: list[float] = []

    def note(self, step: int, read_weights: Callable[[], list[np.ndarray]]) -> None:
        """Evaluates the weights after a step, from 1, if it is one of those that count."""
        left = self._steps - step
        if left < LAST and left % EVERY == 0:
            self._model.set_weights(read_weights())
            outputs = self._model.predict(self._x, batch_size=2500, verbose=0)
            self._found.append(float(np.mean(outputs.argmax(1) == self._y)))

    @property
    def mean(self) -> float:
        """The mean of what was found."""
        return float(np.mean(self._found))


def by_tfdml(rule: tfdml.aggregation.RobustRule, rate: float, attack: str, data: Data) -> float:
    """Returns the accuracy after training by one of tfdml's rules."""
    accuracy = Accuracy(data.dataset, len(data.chosen))
    strategy = tfdml.MirroredStrategy(
        [f"CPU:{i}" for i in range(WORKERS)], gradient_aggregation=rule
    )
    with strategy.scope():
        model = Attacked(attack)
        model.compile(keras.optimizers.SGD(rate), _loss())
    x = tf.constant(data.dataset.x)
    batches = tf.data.Dataset.from_tensor_slices((data.chosen, data.labels))
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: accuracy.note(batch + 1, model.get_weights)
    )
    batches = batches.map(lambda i, y: (tf.gather(x, i), y))
    model.fit(batches, epochs=1, verbose=0, shuffle=False, callbacks=[note])
    return accuracy.mean


def by_byzfl(rule: Callable, momentum: float, rate: float, attack: str, data: Data) -> float:
    """Returns the accuracy after training by one of ByzFL's rules, in one process."""
    accuracy = Accuracy(data.dataset, len(data.chosen))
    with tfdml.alone():
        model, loss = keras.Sequential(layers()), _loss()
    weights = model.trainable_variables

    @tf.function
    def gradients(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        found = []
        for own, labels in zip(tf.split(x, WORKERS), tf.split(y, WORKERS), strict=True):
            with tf.GradientTape() as tape:
                value = loss(labels, model(own, training=True))
            parts = [tf.reshape(g, [-1]) for g in tape.gradient(value, weights)]
            found.append(tf.concat(parts, 0))
        return tf.stack(found)

    averages = 0.0
    sizes = np.cumsum([int(np.prod(w.shape)) for w in weights])[:-1]
    for number, (chosen, labels) in enumerate(zip(data.chosen, data.labels, strict=True), 1):
        own = gradients(tf.constant(data.dataset.x[chosen]), tf.constant(labels)).numpy()
        honest = own[:HONEST]
        known = Known([honest.mean(0)], [(honest**2).mean(0)], [own[0]])
        for worker in range(HONEST, WORKERS):
            (own[worker],) = wrong_gradient(attack, [own[worker]], known, np.sqrt, np.maximum)
        averages = momentum * averages + (1 - momentum) * own
        step = np.asarray(rule(averages), np.float32)
        for weight, part in zip(weights, np.split(step, sizes), strict=True):
            weight.assign_sub(rate * part.reshape(weight.shape))
        accuracy.note(number, model.get_weights)
    return accuracy.mean


def _loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


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
    # Of averaged gradients, which are as long as one; the cited workers send sums, ten times as
    # long, with a tenth of the rate and ten times the radius.
    with_momentum = {"momentum": MOMENTUM, "rate": RATE / (1 - MOMENTUM)}
    clipping = tfdml.aggregation.CenteredClipping(RADIUS, MOMENTUM, ITERATIONS)
    by_clipping = by_tfdml(clipping, with_momentum["rate"], attack, data)
    found = {("tfdml", "centered clipping"): by_clipping}
    for name, rule in {
        "mean": rules.Average(),
        "centered clipping": rules.CenteredClipping(L=ITERATIONS, tau=RADIUS),
        "median": rules.Median(),
        "Krum": rules.Krum(f=WRONG),
    }.items():
        found["ByzFL", name] = by_byzfl(rule, **with_momentum, attack=attack, data=data)
    plain = rules.CenteredClipping(L=ITERATIONS, tau=RADIUS)
    found["ByzFL", "centered clipping, no momentum"] = by_byzfl(plain, 0.0, RATE, attack, data)
    report([[*of, accuracy] for of, accuracy in found.items()])


if __name__ == "__main__":
    start(__doc__, main)
