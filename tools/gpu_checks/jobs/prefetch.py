"""Reports to `tools.gpu_checks` on which device a step receives its rows, and since when.

For example:

    python -m tools.gpu_checks.jobs.prefetch --kind cpu
"""

import time
from typing import Annotated

import typer

from tools.bench.harness import report, start
from tools.gpu_checks.jobs import placement

BATCHES, ROWS, PATIENCE = 8, 6, 10.0


def main(kind: Annotated[str, typer.Option(help="cpu or gpu.")] = "cpu") -> None:
    """Reads batches as `fit` does, on two devices, and waits before it asks for the second one."""
    placement.prepare(kind)
    names = placement.devices(kind, 2)
    import tensorflow as tf

    import tfdml
    from tfdml.strategies.input.device_prefetch import DevicePrefetcher

    read = []

    def batches():
        for number in range(BATCHES):
            read.append(number)
            yield tf.fill([ROWS, 4], float(number))

    extended = tfdml.MirroredStrategy(names).extended
    dataset = tf.data.Dataset.from_generator(
        batches, output_signature=tf.TensorSpec([ROWS, 4], tf.float32)
    )
    # With these options only the mechanism under test reads ahead.
    options = tf.data.Options()
    options.autotune.enabled = False
    local_batches = DevicePrefetcher(
        dataset.with_options(options).map(extended.split_element), names
    )
    found, ahead = [], 0
    for number, local_batch in enumerate(local_batches):
        found.append([part.device for part in local_batch.parts])
        if number == 0:
            until = time.monotonic() + PATIENCE
            while len(read) < 3 and time.monotonic() < until:
                time.sleep(0.01)
            ahead = len(read) - 1
    report(
        {
            "devices": names,
            "parts": found,
            "ahead": ahead,
            "fit copies ahead": bool(extended.copies_ahead),
        }
    )


if __name__ == "__main__":
    start(__doc__, main)
