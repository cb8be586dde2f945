"""Checks the wording of a process's activity and of its errors."""

import re

import keras
import pytest
import tensorflow as tf

from tfdml.runtime.descriptions import describe_error


def broken():
    raise ValueError("the file is gone")


def test_an_error_says_where_it_was_raised():
    with pytest.raises(ValueError, match="gone") as failure:
        broken()
    error, activity = describe_error(failure.value).splitlines()
    assert error == "ValueError: the file is gone"
    assert re.fullmatch(r"at \S+test_activity.py:\d+ in broken", activity)


class Saver(keras.callbacks.Callback):
    """Callback that fails."""

    def on_epoch_end(self, epoch, logs=None):
        broken()


def test_an_error_says_in_which_callback_it_was_raised():
    with pytest.raises(ValueError, match="gone") as failure:
        Saver().on_epoch_end(0)
    _, callback, activity = describe_error(failure.value).splitlines()
    assert callback == "in callback Saver.on_epoch_end"
    assert activity.endswith("in broken")


@tf.function
def step():
    return tf.numpy_function(broken, [], tf.float32)


def from_generator():
    def rows():
        broken()
        yield 0.0

    signature = tf.TensorSpec((), tf.float32)
    return next(iter(tf.data.Dataset.from_generator(rows, output_signature=signature)))


@pytest.mark.parametrize("call", [step, from_generator], ids=["step", "generator"])
def test_errors_in_python_code_of_a_graph_read_like_eager_ones(call):
    """TensorFlow's own message is pages long, with the cause in the middle."""
    with pytest.raises(tf.errors.OpError) as failure:
        call()
    error, how, activity = describe_error(failure.value).splitlines()
    assert error.endswith("ValueError: the file is gone")
    assert how.startswith("in Python code of the graph (")
    assert re.fullmatch(r"at \S+test_activity.py:\d+ in broken", activity)
