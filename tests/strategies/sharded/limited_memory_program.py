"""A rank of a job that trains with limited memory: `limited_memory_program.py MIB [sharded]`.

MIB is what the rank may allocate after its weights exist. It prints what it did.
"""

import resource
import sys
from pathlib import Path

import keras
import numpy as np
from keras import layers

import tfdml

WIDTH, LAYERS, ROWS = 3072, 8, 16


def allocated() -> int:
    """Returns the bytes of this process's writable memory, which `RLIMIT_DATA` limits."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (kilobytes,) = [line.split()[1] for line in lines if line.startswith("VmData")]
    return int(kilobytes) * 1024


def made(strategy: tfdml.HorovodStrategy, width: int, depth: int) -> keras.Model:
    """Returns a model with an optimizer that keeps four numbers for each weight."""
    with strategy.scope():
        keras.utils.set_random_seed(7)
        stack = [layers.Dense(width, activation="tanh") for _ in range(depth)]
        model = keras.Sequential([layers.Input((width,)), *stack])
        model.compile(keras.optimizers.Adam(1e-4, amsgrad=True, use_ema=True), "mse")
    return model


def main() -> None:
    """Trains a small model, so that all threads exist, and then a large one within the limit."""
    room, sharding = int(sys.argv[1]) << 20, None
    if "sharded" in sys.argv:
        sharding = tfdml.Sharding(optimizer_state=True)
    strategy = tfdml.HorovodStrategy(sharding=sharding)
    small = made(strategy, 16, 2)
    x = np.ones((ROWS, 16), "float32")
    small.fit(x, x, batch_size=ROWS // 2, verbose=0)
    model = made(strategy, WIDTH, LAYERS)
    limit = allocated() + room
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    x = np.ones((ROWS, WIDTH), "float32")
    model.fit(x, x, batch_size=ROWS // 2, epochs=2, verbose=0)
    weights = sum(v.numpy().nbytes for v in model.weights)
    print(f"trained {weights >> 20} MiB of weights", flush=True)


if __name__ == "__main__":
    main()
