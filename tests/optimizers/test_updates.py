"""Checks each update against golden values, the formulas in NumPy, and optax."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.optimizers import numpy_optimizers as reference
from tfdml.optimizers import LAMB, LARS

NAMES = ("kernel", "bias", "zero")
WEIGHTS = ([[1, -2], [3, -4]], [0.5, -0.25], [0, 0])
GRADIENTS = (
    ([[0.1, 0.2], [-0.3, 0.4]], [0.05, -0.05], [0.1, -0.2]),
    ([[-0.2, 0.1], [0.3, 0.1]], [0.02, 0.03], [0.3, 0.1]),
    ([[0.05, -0.1], [0.1, -0.2]], [-0.1, 0.04], [-0.1, 0.1]),
)


def arrays(values) -> list[np.ndarray]:
    return [np.array(v, "float64") for v in values]


def steps(optimizer, weights=WEIGHTS, gradients=GRADIENTS, names=NAMES, dtype="float64", rates=()):
    """Applies gradients, with varying rates if given; returns the weights."""
    variables = [
        keras.Variable(w, dtype=dtype, name=n) for w, n in zip(arrays(weights), names, strict=True)
    ]
    for i, step in enumerate(gradients):
        if rates:
            optimizer.learning_rate = rates[i]
        optimizer.apply([tf.constant(g, dtype) for g in arrays(step)], variables)
    return [v.numpy() for v in variables]


def random_case(seed: int):
    """Returns random variables, one of them 0 and one with a gradient of 0; and their names."""
    rng = np.random.default_rng(seed)
    shapes = [tuple(rng.integers(1, 6, rng.integers(0, 4))) for _ in range(5)]
    names = ["kernel", "embeddings", "gamma", "bias", "depthwise"]
    weights = [rng.normal(size=s) * 10.0 ** rng.uniform(-3, 3) for s in shapes]
    gradients = [[rng.normal(size=s) * 10.0 ** rng.uniform(-4, 1) for s in shapes] for _ in "1234"]
    weights[4] *= 0
    gradients[0][1] *= 0
    return weights, gradients, names


# 1.0009134 etc. have 7 digits after the point.
TOLERANCE = {"rtol": 0, "atol": 6e-8}


def test_golden_values_of_lamb():
    optimizer = LAMB(0.01, weight_decay=0.01, epsilon=1e-6, exclude_from_layer_adaptation=[])
    kernel, bias, zero = steps(optimizer)
    golden = [[1.0009134, -2.1074278], [3.0003584, -4.0889405]]
    np.testing.assert_allclose(kernel, golden, **TOLERANCE)
    np.testing.assert_allclose(bias, [0.4944589, -0.24882], **TOLERANCE)
    np.testing.assert_allclose(zero, [-0.0102768, 0.010018], **TOLERANCE)


@pytest.mark.parametrize(
    ("denominator", "golden"),
    [
        ("joint", [[1.0000657, -2.0005329], [2.9996999, -4.0008015]]),
        ("separate", [[1.0000685, -2.0004161], [2.9996546, -4.0005968]]),
    ],
)
def test_golden_values_of_lars(denominator, golden):
    optimizer = LARS(0.1, 0.9, 0.001, weight_decay=0.01, trust_denominator=denominator)
    kernel, bias, zero = steps(optimizer)
    np.testing.assert_allclose(kernel, golden, **TOLERANCE)
    np.testing.assert_allclose(bias, [0.49265, -0.24615], **TOLERANCE)
    np.testing.assert_allclose(zero, [-0.027101, 0.0541956], **TOLERANCE)


# Values of float32, in which a rate is stored.
RATES = [0.125, 0.125, 0.75, 0.03125]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1, "beta_1": 0.8, "beta_2": 0.95, "epsilon": 1e-3},
        {"weight_decay": 0.1, "bias_correction": False},
        {"weight_decay": 0.1, "global_clipnorm": 0.3},
        {"weight_decay": 0.1, "trust_ratio_clip": 0.05},
        {"weight_decay": 0.1, "beta_1": 0.0, "beta_2": 0.0},
    ],
    ids=lambda options: "+".join(options),
)
@pytest.mark.parametrize("adapt_all", [False, True])
def test_lamb_matches_its_formula(options, adapt_all):
    weights, gradients, names = random_case(1)
    excluded = [n in ("gamma", "bias") for n in names]
    more = {"exclude_from_layer_adaptation": []} if adapt_all else {}
    found = steps(LAMB(0.1, **options, **more), weights, gradients, names, rates=RATES)
    decays = [not e for e in excluded]
    adapts = [adapt_all or not e for e in excluded]
    wanted = reference.lamb(weights, gradients, RATES, decays, adapts, **options)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lamb_bias_correction_uses_the_rounded_beta(dtype):
    """0.9999 is 1 in bfloat16, and 1 - 0.9999 loses three digits in float32."""
    rng = np.random.default_rng(0)
    w, g = [rng.normal(size=50)], [[rng.normal(size=50)] for _ in range(3)]
    (wide,) = steps(LAMB(0.5, beta_2=0.9999), w, g, ["bias"])
    (found,) = steps(LAMB(0.5, beta_2=0.9999), w, g, ["bias"], dtype)
    bound = 1e-6 if dtype == "float32" else 0.05
    np.testing.assert_allclose(found.astype("float64"), wide, rtol=bound, atol=bound)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("denominator", ["joint", "separate"])
@pytest.mark.parametrize("rule", ["classic", "popular", "corrected"])
def test_lars_matches_its_formula_at_a_changing_rate(rule, denominator, nesterov):
    weights, gradients, names = random_case(2)
    options = {
        "weight_decay": 0.1,
        "momentum": 0.7,
        "trust_coefficient": 0.02,
        "trust_denominator": denominator,
        "epsilon": 1e-3 if denominator == "separate" else 0.0,
        "nesterov": nesterov,
    }
    optimizer = LARS(
        0.1,
        **options,
        classic_momentum=rule != "popular",
        momentum_correction=rule == "corrected",
    )
    found = steps(optimizer, weights, gradients, names, rates=RATES)
    used = [n not in ("gamma", "bias") for n in names]
    rules = {k: getattr(reference, k) for k in ("classic", "popular", "corrected")}
    by_rule = {
        k: reference.lars(weights, gradients, RATES, used, used, f, **options)
        for k, f in rules.items()
    }
    for a, b in zip(found, by_rule[rule], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9)
    # The rate jumps, so that the rules differ.
    others = [by_rule[k][0] for k in rules if k != rule]
    assert not any(np.allclose(found[0], other, rtol=1e-6, atol=0) for other in others)


def test_momentum_correction_is_the_ratio_of_the_rates():
    """Goyal et al., equation 10, in its form: v = m (new rate / old rate) v + new rate g."""
    w, v, old = np.array([1.0, -2.0]), np.zeros(2), RATES[0]
    gradients = np.random.default_rng(0).normal(size=(4, 2))
    for rate, g in zip(RATES, gradients, strict=True):
        v, old = 0.9 * (rate / old) * v + rate * g, rate
        w = w - v
    everything = LARS(0.1, exclude_from_layer_adaptation=[""], momentum_correction=True)
    (found,) = steps(everything, [[1, -2]], [[g] for g in gradients], ["kernel"], rates=RATES)
    np.testing.assert_allclose(found, w, rtol=1e-12)


def test_lars_without_adaptation_equals_sgd():
    weights, gradients, names = random_case(3)
    found = steps(
        LARS(0.1, 0.75, exclude_from_layer_adaptation=[""]), weights, gradients, names, rates=RATES
    )
    wanted = steps(keras.optimizers.SGD(0.1, 0.75), weights, gradients, names, rates=RATES)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9)


@pytest.fixture(scope="module")
def optax():
    """Runs optax in float64."""
    module = pytest.importorskip("optax")
    import jax

    jax.config.update("jax_enable_x64", True)
    yield module
    jax.config.update("jax_enable_x64", False)


def with_optax(module, transformation, weights, gradients):
    import jax

    @jax.jit
    def update(params, state, step):
        updates, state = transformation.update(step, state, params)
        return module.apply_updates(params, updates), state

    params, state = list(weights), transformation.init(list(weights))
    for step in gradients:
        params, state = update(params, state, step)
    return [np.asarray(p) for p in params]


def table(step):
    """A schedule for both: one rate per step."""
    if isinstance(step, tf.Tensor | keras.Variable):
        return tf.gather(tf.constant(RATES, tf.float64), tf.convert_to_tensor(step))
    import jax.numpy as jnp

    return jnp.asarray(RATES)[step]


class Table(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return table(step)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("clip", [None, 0.5])
def test_lamb_equals_optax(optax, seed, clip):
    weights, gradients, names = random_case(10 + seed)
    mask = [n not in ("gamma", "bias") for n in names]
    chain = [optax.clip_by_global_norm(clip)] if clip else []
    lamb = optax.lamb(table, b1=0.85, b2=0.99, eps=1e-5, weight_decay=0.05, mask=mask)
    wanted = with_optax(optax, optax.chain(*chain, lamb), weights, gradients)
    ours = LAMB(
        Table(), 0.85, 0.99, 1e-5, 0.05, exclude_from_layer_adaptation=[], global_clipnorm=clip
    )
    for a, b in zip(steps(ours, weights, gradients, names), wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("nesterov", [False, True])
def test_lars_equals_optax(optax, seed, nesterov):
    weights, gradients, names = random_case(20 + seed)
    mask = [n not in ("gamma", "bias") for n in names]
    lars = optax.lars(
        table, 0.05, weight_decay_mask=mask, trust_coefficient=0.01, trust_ratio_mask=mask,
        momentum=0.8, nesterov=nesterov,
    )  # fmt: skip
    wanted = with_optax(optax, lars, weights, gradients)
    ours = LARS(Table(), 0.8, 0.01, 0.05, nesterov)
    for a, b in zip(steps(ours, weights, gradients, names), wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9)


BOTH = [
    lambda **more: LAMB(0.1, weight_decay=0.01, **more),
    lambda **more: LARS(0.1, weight_decay=0.01, **more),
    lambda **more: LARS(0.1, weight_decay=0.01, trust_denominator="separate", **more),
    lambda **more: LARS(0.1, weight_decay=0.01, classic_momentum=False, nesterov=True, **more),
]
IDS = ["lamb", "lars", "separate", "popular"]


@pytest.mark.parametrize("make", BOTH, ids=IDS)
def test_norms_of_zero_give_a_ratio_of_one(make):
    zero, one = np.zeros(3), np.ones(3)
    for w, g in ((zero, one), (one, zero), (zero, zero)):
        optimizer = make(exclude_from_layer_adaptation=[], exclude_from_weight_decay=[""])
        optimizer.build([keras.Variable(w, dtype="float64", name="kernel")])
        ratios = optimizer.keep_trust_ratios()
        optimizer.apply([tf.constant(g, "float64")], optimizer._trainable_variables)
        np.testing.assert_array_equal(ratios.read(), [1.0])
        assert np.isfinite(optimizer._trainable_variables[0].numpy()).all()


@pytest.mark.parametrize("make", BOTH, ids=IDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nonfinite_values_are_not_hidden(make, bad):
    for step in ([[bad, 1.0]], [[bad, bad]]):
        (found,) = steps(make(), [[1, 2]], [step], ["kernel"])
        assert not np.isfinite(found).all()


@pytest.mark.parametrize("make", BOTH, ids=IDS)
@pytest.mark.parametrize(
    ("dtype", "rtol"), [("float32", 1e-5), ("float16", 2e-2), ("bfloat16", 0.1)]
)
def test_narrow_dtypes_have_wide_norms(make, dtype, rtol):
    """The sum of squares of 100 values of 60 exceeds float16."""
    rng = np.random.default_rng(0)
    w, g = 60 * rng.normal(size=100), [rng.normal(size=100) for _ in range(2)]
    (wide,) = steps(make(), [w], [[v] for v in g], ["kernel"])
    (found,) = steps(make(), [w], [[v] for v in g], ["kernel"], dtype)
    assert np.isfinite(found.astype("float64")).all()
    moved = np.linalg.norm(wide - w)
    assert np.linalg.norm(found.astype("float64") - wide) < rtol * np.linalg.norm(w) * 0.1
    assert moved > 0


@pytest.mark.parametrize("make", BOTH[:2], ids=IDS[:2])
@pytest.mark.parametrize("jit", [False, True])
def test_compiled_update_equals_eager(make, jit):
    weights, gradients, names = random_case(5)
    eager = steps(make(), weights, gradients, names)
    optimizer = make()
    variables = [
        keras.Variable(w, dtype="float64", name=n) for w, n in zip(weights, names, strict=True)
    ]
    optimizer.build(variables)

    @tf.function(jit_compile=jit)
    def step(gradients):
        optimizer.apply(gradients, variables)

    for g in gradients:
        step([tf.constant(x) for x in g])
    for a, b in zip(variables, eager, strict=True):
        np.testing.assert_allclose(a.numpy(), b, rtol=1e-9)


@pytest.mark.parametrize("make", BOTH, ids=IDS)
def test_parts_of_a_variable_share_one_norm(make):
    rng = np.random.default_rng(0)
    weights, gradients = [rng.normal(size=(6, 4))], [[rng.normal(size=(6, 4))] for _ in "123"]
    (whole,) = steps(make(), weights, gradients, ["kernel"])
    optimizer = make()
    parts = [
        tf.Variable(w, name=f"dense/kernel/part_{i}")
        for i, w in enumerate(np.split(weights[0], [1, 4]))
    ]
    optimizer.build(parts)
    for (g,) in gradients:
        split = [tf.constant(x) for x in np.split(g, [1, 4])]
        optimizer.update_parts(split, parts, optimizer.learning_rate)
        optimizer.iterations.assign_add(1)
    np.testing.assert_allclose(np.concatenate(parts), whole, rtol=1e-9)
    # Separate parts would have norms of their own.
    optimizer = make()
    (alone,) = steps(optimizer, [weights[0][:1]], [[g[0][:1]] for g in gradients], ["kernel"])
    assert not np.allclose(alone, whole[:1], rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LAMB(beta_1=1.0), "`beta_1` must be from 0 to below 1. Received: beta_1=1.0"),
        (lambda: LAMB(beta_2=-0.1), "`beta_2` must be from 0"),
        (lambda: LAMB(epsilon=-1), "`epsilon` must not be negative"),
        (lambda: LAMB(weight_decay=-1), "`weight_decay` must not be negative"),
        (lambda: LAMB(trust_ratio_clip=0), "`trust_ratio_clip` must be positive"),
        (lambda: LAMB(exclude_from_weight_decay=["("]), "`exclude_from_weight_decay` must be a"),
        (lambda: LARS(exclude_from_layer_adaptation=[1]), "`exclude_from_layer_adaptation` must"),
        (lambda: LARS(momentum=1), "`momentum` must be from 0 to below 1"),
        (lambda: LARS(trust_coefficient=0), "`trust_coefficient` must be positive"),
        (lambda: LARS(trust_denominator="sum"), '`trust_denominator` must be "joint" or "sepa'),
        (lambda: LARS(epsilon=-1), "`epsilon` must not be negative"),
        (
            lambda: LARS(classic_momentum=False, momentum_correction=True),
            "`momentum_correction` must be False",
        ),
        (lambda: LARS(eeta=1.0), "not recognized"),
    ],
)
def test_wrong_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()
