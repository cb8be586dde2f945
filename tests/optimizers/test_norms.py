"""Checks that norms are accurate, and bit-identical for any number of threads."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tfdml.optimizers.norms import FEW, ROW, row_norms, squared_norm

SHAPES = [(), (0,), (3,), (20_000,), (5, 7), (3, 3, 128, 130), (70_001, 4)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_sum_of_squares_is_accurate(shape, dtype):
    values = np.random.default_rng(0).normal(size=shape).astype(dtype)
    found = squared_norm(tf.constant(values))
    assert found.dtype == (tf.float64 if dtype == "float64" else tf.float32)
    rtol = 1e-13 if dtype == "float64" else 1e-6
    np.testing.assert_allclose(found, (values.astype("float64") ** 2).sum(), rtol=rtol)


@pytest.mark.parametrize("numbers", [FEW + 1, 3 * FEW + 5, 20 * FEW])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_norms_of_the_rows_of_parts_have_the_bits_of_the_whole(numbers, dtype):
    values = np.random.default_rng(0).normal(size=numbers).astype(dtype)
    cuts = [0, 2 * ROW, 9 * ROW, numbers]
    rows = [row_norms(tf.constant(values[a:b])) for a, b in zip(cuts, cuts[1:], strict=False)]
    assert squared_norm(tf.concat(rows, 0)).numpy() == squared_norm(tf.constant(values)).numpy()


PROGRAM = """
import sys
import numpy as np, tensorflow as tf
from tfdml.optimizers.norms import squared_norm
tf.config.threading.set_intra_op_parallelism_threads(int(sys.argv[1]))
rng = np.random.default_rng(0)
for shape in [(3, 3, 512, 512), (1_000_003,), (300_000, 16)]:
    print(squared_norm(tf.constant(rng.normal(size=shape), tf.float32)).numpy().tobytes().hex())
"""


@pytest.mark.slow
def test_the_number_of_threads_does_not_matter():
    root = Path(__file__).resolve().parents[2]
    outputs = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM, threads],
            cwd=root, capture_output=True, text=True, check=True, timeout=120,
        ).stdout
        for threads in ("1", "2", "8")
    ]  # fmt: skip
    assert outputs[0].count("\n") == 3
    assert outputs[0] == outputs[1] == outputs[2]
