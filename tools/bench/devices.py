"""Times `MirroredStrategy` on logical CPUs against its peers in one run, epochs in turn.

    python -m tools.bench.devices --devices 4

The peers: TensorFlow's `MirroredStrategy`; ours with one bucket, so that the first device sums all
gradients for all; and ours with the devices as a group of TensorFlow's ring, as GPUs are one of
NCCL. A ratio is ours by the peer's, epoch by epoch; below 1 we are faster.
"""

import statistics
from collections.abc import Callable
from typing import Annotated, Any

import typer

from tools.bench.figures import in_words, ratios
from tools.bench.harness import conditions, environment, module_command, report, result_of, start

EPOCHS = 14
STEPS = 20
ROWS = 64
# Number and width of the layers: 9.4 and 0.3 million parameters.
MODELS = {"16 layers of 768": (16, 768), "8 layers of 192": (8, 192)}
PEERS = {
    "stock": "TensorFlow's `MirroredStrategy`",
    "one": "ours, one device for all",
    "ring": "ours, TensorFlow's ring",
}


def make_strategy(who: str, devices: list[str]) -> Any:
    """Returns a new strategy."""
    import tensorflow as tf

    import tfdml
    from tfdml.collectives.device_group import DeviceGroup
    from tfdml.topology import Topology

    if who == "stock":
        return tf.distribute.MirroredStrategy(devices)
    strategy = tfdml.MirroredStrategy(devices, bucket_bytes=2**40 if who == "one" else 4 << 20)
    if who == "ring":
        options = tf.distribute.experimental.CommunicationOptions(
            implementation=tf.distribute.experimental.CommunicationImplementation.RING
        )
        own = strategy.extended.local_devices
        strategy.extended.aggregator_choice.device_group = DeviceGroup(Topology(), own, options)
    return strategy


def fitting(who: str, devices: list[str], model_name: str) -> Callable[[], float]:
    """Returns a callable that trains an epoch and returns its median seconds per step."""
    import time

    import keras
    import numpy as np

    count, width = MODELS[model_name]
    with make_strategy(who, devices).scope():
        layers = [keras.layers.Dense(width, use_bias=False) for _ in range(count)]
        model = keras.Sequential([keras.layers.Input((width,)), *layers])
        model.compile(keras.optimizers.SGD(1e-4), "mse")
    x = np.random.default_rng(0).normal(size=(ROWS * STEPS, width)).astype("float32")
    ends: list[float] = []
    clock = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: ends.append(time.perf_counter())
    )

    def epoch() -> float:
        ends.clear()
        model.fit(x, x, batch_size=ROWS, verbose=0, callbacks=[clock])
        return statistics.median(np.diff(ends).tolist())

    return epoch


def run(model_name: str, count: int) -> None:
    """Times all strategies on this process's logical CPUs; reports the seconds of each epoch."""
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    logical = [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
    tf.config.set_logical_device_configuration(cpu, logical)
    devices = [f"CPU:{i}" for i in range(count)]
    epochs = {who: fitting(who, devices, model_name) for who in ("ours", *PEERS)}
    seconds: dict[str, list[float]] = {who: [] for who in epochs}
    for number in range(EPOCHS + 2):
        # In turn and in alternating order, so that heat or load affects all equally.
        turn = list(epochs.items())
        for who, epoch in turn if number % 2 else turn[::-1]:
            seconds[who].append(epoch())
    # The first two epochs trace and warm up.
    report({who: s[2:] for who, s in seconds.items()})


def main(
    devices: Annotated[int, typer.Option(help="The number of logical CPUs.")] = 4,
    run_model: Annotated[str, typer.Option("--run", hidden=True, help="What a job starts.")] = "",
) -> None:
    """Times the strategy against its peers and prints the table."""
    if run_model:
        return run(run_model, devices)
    print(f"Measured with {conditions(('tensorflow-cpu', 'keras'), load=True)}.\n")
    print("| devices | model | peer | ours, ms a step | peer, ms a step | ratio (quartiles) |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in MODELS:
        command = module_command(__spec__.name, "--run", name, "--devices", str(devices))
        seconds = result_of(command, environment(1), 1200)
        for who, words in PEERS.items():
            own, peer = (1000 * statistics.median(seconds[w]) for w in ("ours", who))
            ratio = in_words(ratios(seconds["ours"], seconds[who]))
            cells = [str(devices), name, words, f"{own:.2f}", f"{peer:.2f}", ratio]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    start(__doc__, main)
