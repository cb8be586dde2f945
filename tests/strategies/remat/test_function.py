"""Checks `remat` of functions: arguments, results, gradients of all orders, and errors."""

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdml

EAGER_OR_NOT = pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])


def _run(function, eager: bool):
    """Calls a function, in a graph or eagerly."""
    return function() if eager else tf.function(function)()


def _gradients(loss, sources, eager: bool) -> list:
    """Returns the gradients of `loss()`; None for those that it does not depend on."""
    known = []

    def compute():
        with tf.GradientTape() as tape:
            tape.watch([s for s in sources if isinstance(s, tf.Tensor)])
            value = loss()
        found = tape.gradient(value, sources)
        known[:] = [gradient is not None for gradient in found]
        return [tf.convert_to_tensor(g) for g in found if g is not None]

    found = iter(_run(compute, eager))
    return [next(found).numpy() if has else None for has in known]


def _same(make_loss, sources, eager: bool, rtol: float = 0.0) -> list:
    """Asserts that gradients with `remat` and without are the same bits; returns them."""
    plain = _gradients(make_loss(lambda function: function), sources, eager)
    ours = _gradients(make_loss(tfdml.remat), sources, eager)
    for one, other in zip(plain, ours, strict=True):
        if one is None or other is None:
            assert one is other
        else:
            np.testing.assert_allclose(other, one, rtol=rtol, atol=0)
    return ours


def _tensor(*shape: int, seed: int = 0) -> tf.Tensor:
    return tf.constant(np.random.default_rng(seed).normal(size=shape))


OF_THE_FILE = _tensor(3, 4, seed=7)


@EAGER_OR_NOT
def test_structures_of_arguments_and_results(eager):
    x, y = _tensor(3, 4), _tensor(3, 4, seed=1)
    mask = tf.constant([True, False, True])

    def loss_of(remat):
        def function(pair, options, *, mask, power):
            product = tf.where(mask[:, None], pair[0] * pair[1], options["other"])
            ids = tf.argmax(product, axis=1)
            return {"product": product**power, "ids": ids, "name": "name", "none": None}

        def loss():
            results = remat(function)((x, y), {"other": 2.0 * x}, mask=mask, power=3)
            assert (results["name"], results["none"]) == ("name", None)
            return tf.reduce_sum(results["product"]) + tf.cast(
                tf.reduce_sum(results["ids"]), x.dtype
            )

        return loss

    assert all(g is not None for g in _same(loss_of, [x, y], eager))


@EAGER_OR_NOT
def test_tensors_and_variables_of_the_surrounding_code(eager):
    """`tf.recompute_grad` loses the gradient of tensors that a function takes from elsewhere."""
    x, variable = _tensor(3, 4), tf.Variable(_tensor(4, seed=1))
    table = tf.Variable(_tensor(5, 4, seed=2))

    def loss_of(remat):
        def loss():
            scale = tf.exp(variable)
            function = remat(lambda v: tf.tanh(v * scale) + tf.gather(table, [1, 3, 1]) * variable)
            partial = remat(functools.partial(tf.multiply, scale))
            return tf.reduce_sum(partial(function(x)))

        return loss

    assert all(g is not None for g in _same(loss_of, [x, variable, table], eager))


@EAGER_OR_NOT
def test_an_argument_that_the_function_also_takes_from_elsewhere(eager):
    x = _tensor(3, 4)

    def loss_of(remat):
        def loss():
            scale = tf.exp(x)
            return tf.reduce_sum(remat(lambda v: tf.tanh(v * scale) + scale)(scale))

        return loss

    # Its gradients are added in another order.
    _same(loss_of, [x], eager, rtol=1e-13)


@EAGER_OR_NOT
@pytest.mark.parametrize("order", ["001", "010", "011"])
def test_an_argument_that_comes_twice(eager, order):
    """Its gradients are added in the order in which they are without a block."""
    x = _tensor(30, 4)

    def loss_of(remat):
        def three(*given):
            one, two, three = (given[int(i)] for i in order)
            return tf.sin(one) + tf.exp(two) + tf.tanh(three)

        function = remat(three)

        def loss():
            twice = 2.0 * x
            return tf.reduce_sum(function(twice, twice))

        return loss

    _same(loss_of, [x], eager)


@EAGER_OR_NOT
def test_a_tensor_of_the_file(eager):
    def loss_of(remat):
        return lambda: tf.reduce_sum(remat(lambda v: tf.tanh(v * OF_THE_FILE))(_tensor(3, 4)))

    assert _same(loss_of, [OF_THE_FILE], eager)[0] is not None


@EAGER_OR_NOT
def test_what_does_not_matter_has_no_gradient(eager):
    """None as without `remat`: for a gradient of 0, an optimizer would decay its momentum."""
    x, used, unused = _tensor(3), tf.Variable(2.0, dtype="float64"), tf.Variable(3.0)

    def loss_of(remat):
        def function(value, other):
            tf.convert_to_tensor(unused)
            return value * used

        return lambda: tf.reduce_sum(remat(function)(x, 2.0 * x))

    assert _same(loss_of, [used, unused], eager)[1] is None


@EAGER_OR_NOT
def test_second_derivatives(eager):
    """As of a gradient penalty, for which `tf.recompute_grad` raises an error."""
    x, kernel = _tensor(3, 4), tf.Variable(_tensor(4, 4, seed=1))

    def loss_of(remat):
        function = remat(lambda value: tf.tanh(value @ kernel))

        def loss():
            with tf.GradientTape() as inner:
                inner.watch(x)
                value = tf.reduce_sum(function(function(x)))
            return tf.reduce_sum(inner.gradient(value, x) ** 2)

        return loss

    # More than two gradients are added up for a tensor, in another order.
    _same(loss_of, [x, kernel], eager, rtol=1e-13)


@EAGER_OR_NOT
def test_a_tape_in_a_block(eager):
    x, kernel = _tensor(3, 4), tf.Variable(_tensor(4, 4, seed=1))

    def loss_of(remat):
        def function(value):
            with tf.GradientTape() as inner:
                inner.watch(value)
                energy = tf.reduce_sum(tf.tanh(value @ kernel) ** 2)
            return value - 0.1 * inner.gradient(energy, value)

        return lambda: tf.reduce_sum(remat(function)(x) ** 2)

    refused = pytest.raises(ValueError, match="must not take gradients by a tape of its own")
    with refused if eager else contextlib.nullcontext():
        _same(loss_of, [x, kernel], eager)


def test_a_tensor_that_a_block_leaves_elsewhere():
    """Such as attention scores that a layer stores, for a loss of their own."""
    x, kept = _tensor(3, 4), []

    def loss_of(remat):
        def function(value):
            kept.append(tf.exp(value))
            return tf.sin(value)

        def loss():
            kept.clear()
            results = remat(function)(x)
            return tf.reduce_sum(results) + tf.reduce_sum(kept[0])

        return loss

    _same(loss_of, [x], False)


@EAGER_OR_NOT
def test_a_persistent_tape_takes_several_gradients(eager):
    x = _tensor(3)
    dropout = layers.Dropout(0.5, seed=1, dtype="float64")

    def compute():
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            kept = tfdml.remat(lambda value: dropout(value, training=True))(x)
            double = 2.0 * kept
        return kept, tape.gradient(kept, x), tape.gradient(double, x)

    kept, one, two = (t.numpy() for t in _run(compute, eager))
    np.testing.assert_array_equal(one, np.where(kept != 0, 2.0, 0.0))
    np.testing.assert_array_equal(two, 2.0 * one)


@EAGER_OR_NOT
def test_blocks_in_blocks(eager):
    """Each level is computed again, and gets the seeds of its own first pass."""
    x = _tensor(8, 4)
    dropout = layers.Dropout(0.5, seed=1, dtype="float64")
    counter = layers.BatchNormalization(dtype="float64")
    counter.build((8, 4))
    made = []

    def loss_of(remat):
        dropout.seed_generator.state.assign([1, 0])
        counter.moving_mean.assign(np.zeros(4))
        inner = remat(lambda value: counter(dropout(value, training=True), training=True))
        outer = remat(lambda value: inner(tf.sin(inner(value))) + dropout(value, training=True))

        def loss():
            made.append(remat)
            return tf.reduce_sum(outer(outer(x)) ** 3)

        return loss

    means = []
    for remat in (lambda function: function, tfdml.remat):
        found = _gradients(loss_of(remat), [x], eager)
        means.append([*found, counter.moving_mean.numpy(), dropout.seed_generator.state.numpy()])
    for one, other in zip(*means, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_variable_that_a_block_reads_and_assigns():
    """It is read again as it was before the block: a counter, or the states of an `RNN`."""
    x = _tensor(3)
    counter = keras.Variable(1.0, dtype="float64", trainable=False)

    def loss_of(remat):
        counter.assign(1.0)

        def function(value):
            value = value * counter
            counter.assign_add(2.0)
            return tf.sin(value * counter)

        return lambda: tf.reduce_sum(remat(function)(remat(function)(x)))

    for eager in (False, True):
        _same(loss_of, [x], eager)
        assert float(counter) == 5.0


@pytest.mark.slow
def test_states_of_a_recurrent_layer():
    x = _tensor(2, 3, 4)
    lstm = layers.LSTM(4, stateful=True, dtype="float64")
    lstm.build((2, 3, 4))
    variables = [v.value for v in lstm.trainable_variables]

    def loss_of(remat):
        lstm.reset_states()
        function = remat(lambda value: lstm(value))
        return lambda: tf.reduce_sum(function(x)) + tf.reduce_sum(function(2.0 * x))

    _same(loss_of, [x, *variables], False)


def test_stateless_scopes():
    """As in `stateless_call`: variables have the scope's values, and change in the scope alone."""
    x = _tensor(6, 4)
    norm = layers.BatchNormalization(dtype="float64")
    dense = layers.Dense(4, activation="tanh", dtype="float64")
    dense.build((6, 4)), norm.build((6, 4))
    kernel = _tensor(4, 4, seed=5)

    def loss_of(remat):
        def loss():
            with keras.StatelessScope([(dense.kernel, kernel)]) as scope:
                function = remat(lambda value: norm(dense(value), training=True))
                total = tf.reduce_sum(function(function(x)) ** 3)
            mean = scope.get_current_value(norm.moving_mean)
            # What a block assigns has no gradient if it runs eagerly.
            return total + (0.0 if tf.executing_eagerly() else tf.reduce_sum(mean))

        return loss

    # More than two gradients are added up for a tensor, in another order.
    for eager in (False, True):
        assert _same(loss_of, [x, kernel], eager, rtol=1e-13)[1] is not None
    np.testing.assert_array_equal(norm.moving_mean.numpy(), np.zeros(4))


def test_functions_called_in_loops_and_inner_functions():
    x, kernel = _tensor(3, 4), tf.Variable(_tensor(4, 4, seed=1))

    def loss_of(remat):
        function = remat(lambda value: tf.tanh(value @ kernel))
        inner = tf.function(lambda value: function(function(value)))

        def loss():
            value = inner(x)
            value = tf.cond(value[0, 0] < 100.0, lambda: function(function(value)), lambda: value)
            step = lambda i, v: (i + 1, function(v))  # noqa: E731
            return tf.reduce_sum(tf.while_loop(lambda i, v: i < 3, step, (0, value))[1])

        return loss

    _same(loss_of, [x, kernel], False)


def test_mixed_precision():
    """The second pass runs where the first one's dtype scope has ended."""
    layer = layers.Dense(4, dtype="mixed_float16")
    layer.build((3, 4))
    x = tf.cast(_tensor(3, 4), "float16")

    class Outer(layers.Layer):
        def __init__(self, remat):
            super().__init__(dtype="mixed_float16")
            self.kernel = self.add_weight(shape=(4, 4), initializer="ones")
            self._function = remat(lambda value: value @ self.kernel.value)

        def call(self, inputs):
            return self._function(inputs)

    made = {remat: Outer(remat) for remat in (lambda f: f, tfdml.remat)}
    found = []
    for outer in made.values():
        kernel = outer.kernel.value
        found += _gradients(lambda o=outer: tf.reduce_sum(o(x)), [kernel], False)
    np.testing.assert_array_equal(*found)


def test_training_of_the_call_is_that_of_the_first_pass():
    """Keras tells inner layers of `training` only while the outer call runs."""

    class Outer(keras.Model):
        def __init__(self, remat):
            super().__init__(dtype="float64")
            self.dropout = layers.Dropout(0.5, seed=1, dtype="float64")
            self._function = remat(lambda value: self.dropout(value) ** 2)

        def call(self, inputs):
            return self._function(inputs)

    x = _tensor(64)
    found = []
    for outer in (Outer(lambda function: function), Outer(tfdml.remat)):
        found += _gradients(lambda o=outer: tf.reduce_sum(o(x, training=True)), [x], False)
    assert (found[0] == 0).any()
    np.testing.assert_array_equal(*found)


def test_without_a_gradient_nothing_is_noted():
    calls = []
    function = tfdml.remat(lambda value: calls.append(1) or value * 2.0)
    assert float(function(tf.constant(2.0))) == 4.0
    assert len(calls) == 1


def test_the_function_keeps_its_name():
    def named(value):
        """Text."""
        return value

    assert (tfdml.remat(named).__name__, tfdml.remat(named).__doc__) == ("named", "Text.")


@pytest.mark.parametrize("target", [3, layers.Dense, None])
def test_other_targets_are_refused(target):
    with pytest.raises(ValueError, match="`target` must be a layer, a model or a function"):
        tfdml.remat(target)


def test_random_numbers_of_tensorflow_are_refused():
    function = tfdml.remat(lambda value: value * tf.random.uniform(value.shape, dtype=value.dtype))
    with pytest.raises(ValueError, match="must draw random numbers by `keras.random`"):
        _gradients(lambda: tf.reduce_sum(function(_tensor(3))), [], False)


def test_random_numbers_in_a_loop_are_refused():
    dropout = layers.Dropout(0.5, seed=1, dtype="float64")
    step = lambda i, v: (i + 1, dropout(v, training=True))  # noqa: E731
    function = tfdml.remat(lambda v: tf.while_loop(lambda i, v: i < 3, step, (0, v))[1])
    with pytest.raises(ValueError, match="outside of loops and branches of the graph"):
        _gradients(lambda: tf.reduce_sum(function(_tensor(3))), [], False)


@pytest.mark.parametrize("what", ["outputs", "seeds", "added losses"])
def test_a_block_that_changes_is_refused(what):
    """Between its passes, the program changes what the block's code depends on."""
    dropout, adds = layers.Dropout(0.5, seed=1, dtype="float64"), layers.Layer(dtype="float64")
    again = []

    def changes(value):
        results = [value * 2.0]
        if what == "outputs" and again:
            results.append(value)
        if what == "seeds" and not again:
            results = [dropout(value, training=True)]
        if what == "added losses" and again:
            adds.add_loss(tf.reduce_sum(value))
        again.append(True)
        return results

    function = tfdml.remat(changes)
    x = _tensor(3)
    with pytest.raises(ValueError, match=f"must do the same when .* {what}"):
        _gradients(lambda: tf.reduce_sum(function(x)[0]), [x], False)
