"""Checks each codec against NumPy, at its limits, and on average."""

import functools
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.compression import numpy_codecs
from tests.harness.command import run_python
from tfdml import compression
from tfdml.compression import (
    QSGD,
    BFloat16,
    Float16,
    NaturalCompression,
    OneBit,
    RandomK,
    TernGrad,
    TopK,
)
from tfdml.compression.codecs.packing import noise, pack, unpack

SEED = tf.constant([1, 2])


def tiled(*shape: int) -> OneBit:
    """Returns the codec for gradients of a shape."""
    return OneBit().parts([shape])[0][0]


CODECS = [
    Float16(),
    BFloat16(),
    QSGD(8, 64),
    QSGD(4, 64, "l2"),
    QSGD(2, 64, "max", stochastic=True),
    NaturalCompression(),
    TernGrad(),
    tiled(64, 64),
    TopK(0.1),
]


def numbers(rows: int, length: int, seed: int = 0) -> np.ndarray:
    """Returns normal values whose sizes differ by orders of magnitude along a row."""
    rng = np.random.default_rng(seed)
    sizes = 10.0 ** rng.uniform(-6, 2, (rows, length // 64))
    return (rng.normal(size=(rows, length)) * np.repeat(sizes, 64, 1)).astype("float32")


@functools.cache
def compiled(codec) -> tuple[Callable, Callable]:
    """Returns the codec's functions, compiled as in training: once for each shape."""
    return tuple(tf.function(f, jit_compile=codec.static) for f in (codec.encode, codec.decode))


def there_and_back(codec, rows: np.ndarray, seed=SEED) -> np.ndarray:
    """Encodes and decodes."""
    encode, decode = compiled(codec)
    payload = encode(tf.constant(rows), seed)
    assert payload.dtype == tf.uint8
    return decode(payload, rows.shape[1]).numpy()


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("length", [8, 24, 4096])
def test_packing_keeps_every_code(bits, length):
    codes = np.random.default_rng(0).integers(0, 2**bits, (3, length), np.uint8)
    packed = pack(tf.constant(codes), bits, 8)
    assert packed.shape == (3, length * bits // 8)
    np.testing.assert_array_equal(unpack(packed, bits, 8), codes)


def test_noise_is_uniform_and_seeded():
    one, other = (noise([200, 500], tf.constant([3, s])).numpy() for s in (5, 6))
    assert one.tobytes() == noise([200, 500], tf.constant([3, 5])).numpy().tobytes()
    for values in (one, other):
        assert values.min() >= 0
        assert values.max() < 1
        counts = np.histogram(values, 64, (0, 1))[0]
        # Chi-squared with 63 degrees of freedom: 5 standard deviations.
        assert ((counts - 1562.5) ** 2 / 1562.5).sum() < 63 + 5 * np.sqrt(2 * 63)
    for a, b in ((one, other), (one[:, 1:], one[:, :-1]), (one[1:], one[:-1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 5 / np.sqrt(a.size)


@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_qsgd_matches_its_formula(bits, norm):
    rows = numbers(3, 256)
    codec = QSGD(bits, bucket_size=64, norm=norm)
    payload, decoded = numpy_codecs.qsgd(rows, bits, 64, norm)
    if norm == "max":  # A sum of squares may round differently, and so a code may.
        assert codec.encode(tf.constant(rows), SEED).numpy().tobytes() == payload
    np.testing.assert_allclose(there_and_back(codec, rows), decoded, rtol=1e-5)


def test_float16_matches_its_formula_and_keeps_small_numbers():
    rows = np.concatenate([numbers(2, 4096), numbers(2, 4096) * 1e-20], 1)
    decoded = there_and_back(Float16(), rows)
    np.testing.assert_allclose(decoded, numpy_codecs.float16(rows), rtol=1e-6)
    tiny = np.full((1, 4096), 2e-8, "float32")
    np.testing.assert_allclose(there_and_back(Float16(), tiny), tiny, rtol=1e-3)


def test_bfloat16_rounds_to_eight_bits():
    rows = numbers(2, 128)
    np.testing.assert_allclose(there_and_back(BFloat16(), rows), rows, rtol=2**-8)


def test_natural_compression_rounds_to_adjacent_powers_of_two():
    rows = numbers(2, 1024)
    blocks = rows.reshape(2, 2, 512).astype("float64")
    largest = np.abs(blocks).max(2, keepdims=True)
    below = 2.0 ** np.floor(np.log2(np.abs(blocks) / largest)) * largest
    decoded = there_and_back(NaturalCompression(), rows).reshape(2, 2, 512)
    assert (np.sign(decoded) == np.sign(blocks)).all()
    sizes = np.abs(decoded)
    near = np.isclose(sizes, below, rtol=1e-5) | np.isclose(sizes, 2 * below, rtol=1e-5)
    assert near.all()
    assert 0.2 < np.isclose(sizes, 2 * below, rtol=1e-5).mean() < 0.8


def test_natural_compression_is_unbiased():
    rows = np.tile(numbers(1, 512), (400, 1))
    codec = NaturalCompression()
    decoded = np.concatenate([there_and_back(codec, rows, tf.constant([3, s])) for s in range(10)])
    # The variance of a value's code is at most 1/8 of its square.
    bound = 5 * np.sqrt(1 / 8 / len(decoded)) * np.abs(rows[0])
    assert (np.abs(decoded.mean(0) - rows[0]) < bound + 1e-12).all()


def test_tern_grad_sends_three_values_and_is_unbiased_within_the_clip():
    rows = np.random.default_rng(0).normal(size=(1, 4096)).astype("float32")
    rows[0, 7] = 100.0
    bound = 2.5 * np.sqrt((rows**2).mean())
    codec = TernGrad()
    decoded = np.concatenate([there_and_back(codec, rows, tf.constant([3, s])) for s in range(600)])
    np.testing.assert_allclose(np.unique(decoded), [-bound, 0, bound], rtol=1e-5)
    assert decoded[:, 7].mean() == pytest.approx(bound, rel=1e-5)
    inside = np.abs(rows[0]) < bound
    error = np.abs(decoded.mean(0) - rows[0])[inside]
    assert error.max() < 5 * 0.5 * bound / np.sqrt(600)


def test_one_bit_matches_its_formula():
    """Three rows of two tiles each; row and column sizes differ by orders of magnitude."""
    rng = np.random.default_rng(0)
    sizes = 10.0 ** rng.uniform(-4, 2, (3, 2, 8, 1)) * 10.0 ** rng.uniform(-1, 1, (3, 2, 1, 600))
    tiles = (rng.normal(size=sizes.shape) * sizes).astype("float32")
    tiles[1, 1], tiles[2, 0, 3], tiles[2, 1, :, 7] = 0, 0, 0
    codec, rows = tiled(200, 300), tiles.reshape(3, -1)
    assert codec.block == 8 * 600
    decoded = there_and_back(codec, rows).reshape(tiles.shape)
    for index in np.ndindex(3, 2):
        wanted = numpy_codecs.one_bit(tiles[index])
        # A column's size may be rounded up or down.
        assert np.mean(np.abs(decoded[index] - wanted) > 1e-3 * np.abs(wanted)) < 0.01
        np.testing.assert_allclose(decoded[index], wanted, rtol=0.05)
    payload = codec.encode(tf.constant(rows), SEED)
    assert payload.shape == (3, 2 * (8 * 4 + 600 + 600))


@pytest.mark.parametrize(
    ("shape", "rows", "columns"),
    [
        ((2048, 2048), 64, 2048),
        ((3, 3, 64, 64), 8, 512),
        ((1568, 64), 24, 512),
        ((784, 300), 48, 600),
        ((20, 51), 8, 561),
        ((64, 1001), 8, 1001),
    ],
)
def test_tiles_of_one_bit_hold_whole_rows(shape, rows, columns):
    ((codec, members),) = OneBit().parts([shape])
    assert (codec.block, members) == (rows * columns, [0])
    assert columns % shape[-1] == 0
    assert codec.row_bytes(2 * codec.block) == 2 * (rows * 4 + columns + rows * columns // 8)


def test_gradients_of_one_shape_share_compiled_functions():
    codec = OneBit()
    (one, _), (other, _), (third, _) = codec.parts([(64, 64), (128, 32), (64, 300)])
    assert one is other is codec.parts([(64, 64)])[0][0] is not third


def test_top_k_matches_its_formula():
    rows = numbers(3, 256)
    decoded = there_and_back(TopK(0.1), rows)
    for row, sent in zip(rows, decoded, strict=True):
        largest = np.argsort(-np.abs(row))[:26]
        wanted = np.zeros_like(row)
        wanted[largest] = row[largest]
        np.testing.assert_array_equal(sent, wanted)


def test_random_k_draws_new_uniform_indices_each_time():
    codec = RandomK(0.1)
    state, counts = codec.init("kernel", (20, 50)), np.zeros((20, 50))
    for _ in range(300):
        send, spread = codec.steps
        (payload,), indices = send([tf.ones((20, 50))], [state])
        assert payload.shape == (100,)
        (spread,), (state,), _ = spread([tf.ones((20, 50))], [state], indices, [payload])
        assert spread.numpy().sum() == 100, "Distinct indices."
        counts += spread.numpy()
    # Binomial: 300 draws with 1 in 10.
    assert np.abs(counts - 30).max() < 6 * np.sqrt(300 * 0.1 * 0.9)


@pytest.mark.parametrize("codec", [c for c in CODECS if not isinstance(c, TopK)], ids=repr)
def test_zeros_denormals_and_huge_numbers(codec):
    length = 2 * max(64, codec.block)
    for value in (0.0, 1e-40, 1e-30, -3e38):
        decoded = there_and_back(codec, np.full((2, length), value, "float32"))
        assert np.isfinite(decoded).all()
        coarse = isinstance(codec, QSGD | TernGrad)
        bound = abs(value) * (1.1 if coarse else 0.01)
        assert np.abs(decoded.astype("float64") - value).max() <= max(bound, 1e-37)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_nonfinite_values_stay_nonfinite(codec, bad):
    length = 2 * max(64, codec.block)
    rows = numbers(2, length)
    rows[1, length - 3] = bad
    decoded = there_and_back(codec, rows)
    assert np.isfinite(decoded[0]).all()
    assert not np.isfinite(decoded[1]).all()


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("norm", ["max", "l2"])
def test_stochastic_rounding_is_unbiased(bits, norm):
    rows = numbers(1, 64)
    codec = QSGD(bits, bucket_size=64, norm=norm, stochastic=True)
    trials = 4000
    decoded = np.stack(
        [codec.decode(codec.encode(tf.constant(np.tile(rows, (50, 1))), tf.constant([7, s])), 64)
         for s in range(trials // 50)]
    ).reshape(-1, 64)  # fmt: skip
    step = (np.abs(rows).max() if norm == "max" else np.linalg.norm(rows)) / (2 ** (bits - 1) - 1)
    # Rounding one value has a standard deviation of at most half a step; 5 of those of the mean.
    assert np.abs(decoded.mean(0) - rows[0]).max() < 5 * 0.5 * step / np.sqrt(trials)
    assert len(np.unique(decoded[:, 0])) > 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: QSGD(bits=3), "`bits` must be 8, 4 or 2. Received: bits=3"),
        (lambda: QSGD(bucket_size=100), "`bucket_size` must be a positive multiple of 8"),
        (lambda: QSGD(norm="l1"), '`norm` must be "max" or "l2"'),
        (lambda: compression.PowerSGD(0), "`rank` must be a positive integer"),
        (lambda: TopK(0.0), "`ratio` must be the part that is sent"),
        (lambda: RandomK(2), "`ratio` must be the part that is sent"),
        (lambda: TernGrad(clip=0), "`clip` must be positive"),
        (lambda: compression.get("zip"), "`compression` must be a compressor such as"),
    ],
)
def test_wrong_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("codec", [*CODECS, compression.PowerSGD(3), RandomK(0.2)], ids=repr)
def test_compressors_are_serialisable(codec):
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(codec))
    assert repr(again) == repr(codec)


def test_names_stand_for_compressors():
    assert repr(compression.get("int4")) == repr(QSGD(bits=4))
    assert isinstance(compression.get("fp16"), Float16)
    assert compression.get(None) is None
    assert compression.get("none") is None
    for name in ("topk", "top_k", "TopK", "TOP-K"):
        assert isinstance(compression.get(name), TopK)
    assert repr(compression.get("NaturalCompression")) == repr(compression.get("natural"))


def test_names_are_the_same_in_help_documentation_and_errors():
    root = Path(__file__).resolve().parents[2]
    page = (root / "docs" / "compression.md").read_text(encoding="utf-8")
    assert [name for name in compression.names() if f'`"{name}"`' not in page] == []
    with pytest.raises(ValueError, match=", ".join(map(repr, compression.names()))):
        compression.get("zip")
    shown = run_python("recipes/compressed.py", "--help", COLUMNS="200").stdout
    assert [name for name in compression.names() if name not in shown] == []
