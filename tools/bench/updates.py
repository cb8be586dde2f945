"""Times an optimizer's update of a variable: in one pass, and by Keras's own operations.

    python -m tools.bench.updates

Two replicas on the devices of one process update 25 million numbers each. The two ways are timed
in turns, and have the same bits.
"""

import contextlib
import statistics
import time
from collections.abc import Callable
from unittest import mock

import keras
import tensorflow as tf

import tfdml
from tfdml.strategies.keras_seam.step import one_pass_updates
from tools.bench.harness import conditions, start

SHAPE, VARIABLES, TURNS, WARM_UP = (2048, 2048), 6, 20, 3
OPTIMIZERS: dict[str, Callable[[], keras.Optimizer]] = {
    "SGD": lambda: keras.optimizers.SGD(0.01),
    "SGD with momentum": lambda: keras.optimizers.SGD(0.01, momentum=0.9),
    "Adam": keras.optimizers.Adam,
}


def update_of(
    optimizer: keras.Optimizer, variables: list[keras.Variable], in_one_pass: bool
) -> Callable[[], object]:
    """Returns a function that updates all variables on all replicas."""
    gradients = [tf.random.stateless_normal(SHAPE, [i, 2]) for i in range(len(variables))]
    strategy = tf.distribute.get_strategy()

    @tf.function
    def update() -> None:
        for gradient, variable in zip(gradients, variables, strict=True):
            strategy.extended.update(
                variable.value,
                lambda own, g: optimizer.update_step(g, own, optimizer.learning_rate),
                (gradient,),
                group=False,
            )

    by_keras = mock.patch.object(one_pass_updates, "is_of_replicas", return_value=False)
    with contextlib.nullcontext() if in_one_pass else by_keras:
        update()
    return update


def main() -> None:
    """Prints the median milliseconds of both ways, and their ratio."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    strategy = tfdml.MirroredStrategy(["CPU:0", "CPU:1"])
    print(conditions())
    with strategy.scope():
        for name, make in OPTIMIZERS.items():
            variables = [
                keras.Variable(tf.random.stateless_normal(SHAPE, [i, 1])) for i in range(VARIABLES)
            ]
            seconds: dict[bool, list[float]] = {True: [], False: []}
            optimizers = {way: make() for way in seconds}
            for optimizer in optimizers.values():
                optimizer.build(variables)
            updates = {way: update_of(o, variables, way) for way, o in optimizers.items()}
            for _ in range(WARM_UP + TURNS):
                for way, update in updates.items():
                    begin = time.perf_counter()
                    update()
                    for variable in variables:
                        for value in variable.value.values:
                            value[0, 0].numpy()
                    seconds[way].append(time.perf_counter() - begin)
            own, keras_own = (
                1e3 * statistics.median(times[WARM_UP:]) for times in seconds.values()
            )
            print(
                f"{name}: {own:.1f} ms in one pass, {keras_own:.1f} by Keras: {own / keras_own:.2f}"
            )


if __name__ == "__main__":
    start(__doc__, main)
