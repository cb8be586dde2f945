"""Times updates of ResNet-50's variables: ours against Keras's Adam, in turn, in one process.

    python -m tools.bench.optimizers

The variables are those of ResNet-50 as it is trained on ImageNet: 53 kernels of convolutions
without biases, 53 scales and 53 offsets of batch normalisations, a kernel and a bias. An update is
a `tf.function` that applies gradients which are there already.
"""

import statistics
import time

from tools.bench.figures import in_words, ratios
from tools.bench.harness import conditions, start

ROUNDS = 60
WARM_UP = 3


def shapes() -> list[tuple[str, tuple[int, ...]]]:
    """Returns the names and shapes of the 161 variables, 25.6 million parameters."""
    kernels = [(7, 7, 3, 64)]
    width = 64
    for blocks, inner in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            if block == 0:
                kernels.append((1, 1, width, 4 * inner))
            kernels += [(1, 1, width, inner), (3, 3, inner, inner), (1, 1, inner, 4 * inner)]
            width = 4 * inner
    named = [
        (name, shape)
        for kernel in kernels
        for name, shape in (("kernel", kernel), ("gamma", kernel[-1:]), ("beta", kernel[-1:]))
    ]
    return [*named, ("kernel", (width, 1000)), ("bias", (1000,))]


def measure() -> dict[str, list[float]]:
    """Returns the seconds of each update, by optimizer; those of a round are adjacent in time."""
    import keras
    import numpy as np
    import tensorflow as tf

    from tfdml.optimizers import LAMB, LARS

    rng = np.random.default_rng(0)
    gradients = [tf.constant(rng.normal(size=s, scale=0.01), tf.float32) for _, s in shapes()]

    def update(optimizer):
        variables = [
            keras.Variable(rng.normal(size=s, scale=0.05), dtype="float32", name=n)
            for n, s in shapes()
        ]
        optimizer.build(variables)
        function = tf.function(lambda: optimizer.apply(gradients, variables))
        for _ in range(WARM_UP):
            function()
        return function

    updates = {
        "Keras `Adam`": update(keras.optimizers.Adam(1e-3)),
        "Keras `Adam`, `global_clipnorm`": update(keras.optimizers.Adam(1e-3, global_clipnorm=1.0)),
        "Keras `AdamW`": update(keras.optimizers.AdamW(1e-3, weight_decay=0.01)),
        "Keras `Lamb`": update(keras.optimizers.Lamb(1e-3, weight_decay=0.01)),
        "Keras `SGD`, momentum": update(keras.optimizers.SGD(0.1, 0.9)),
        "`LAMB`": update(LAMB(1e-3, weight_decay=0.01)),
        "`LAMB`, all adapted, `global_clipnorm`": update(
            LAMB(1e-3, weight_decay=0.01, exclude_from_layer_adaptation=[], global_clipnorm=1.0)
        ),
        "`LARS`": update(LARS(0.1, weight_decay=1e-4)),
        '`LARS`, "separate"': update(LARS(0.1, weight_decay=1e-4, trust_denominator="separate")),
    }
    seconds: dict[str, list[float]] = {name: [] for name in updates}
    names = list(updates)
    for number in range(ROUNDS):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            begin = time.perf_counter()
            updates[name]()
            seconds[name].append(time.perf_counter() - begin)
    return seconds


def table(seconds: dict[str, list[float]]) -> str:
    """Returns the rows as a Markdown table."""
    base = seconds["Keras `Adam`"]
    lines = [
        "| optimizer | ms an update | ratio to Keras's `Adam` (quartiles) | ratio of the fastest |",
        "|---|---|---|---|",
    ]
    for name, times in seconds.items():
        lines.append(
            f"| {name} | {statistics.median(times) * 1000:.1f} | {in_words(ratios(times, base))} | "
            f"{min(times) / min(base):.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Prints the table."""
    print(f"Measured with {conditions()}.\n\n{table(measure())}")


if __name__ == "__main__":
    start(__doc__, main)
