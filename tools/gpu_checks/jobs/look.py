"""Reports TensorFlow's devices to `tools.gpu_checks`, and the error of their products.

For example:

    python -m tools.gpu_checks.jobs.look --kind cpu
"""

from typing import Annotated

import typer

from tools.bench.harness import report, start
from tools.gpu_checks.jobs import placement


def main(kind: Annotated[str, typer.Option(help="cpu or gpu.")] = "cpu") -> None:
    """Multiplies matrices on each device; reports the largest error against NumPy."""
    placement.prepare(kind)
    import numpy as np
    import tensorflow as tf

    placement.exact_products()
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(256, 256)) for _ in range(2))
    found = []
    for physical in tf.config.list_physical_devices(kind.upper()):
        name = physical.name.removeprefix("/physical_device:")
        with tf.device(name):
            product = tf.linalg.matmul(tf.constant(a, tf.float32), tf.constant(b, tf.float32))
        details = tf.config.experimental.get_device_details(physical)
        found.append(
            {
                "name": name,
                "kind": details.get("device_name", ""),
                "capability": ".".join(map(str, details.get("compute_capability", ()))),
                "on": product.device,
                "error": float(np.abs(product.numpy() - a @ b).max()),
            }
        )
    build = tf.sysconfig.get_build_info()
    report(
        {
            "devices": found,
            "with_cuda": tf.test.is_built_with_cuda(),
            "cuda": build.get("cuda_version", ""),
            "cudnn": build.get("cudnn_version", ""),
        }
    )


if __name__ == "__main__":
    start(__doc__, main)
