"""Python functions of a server's process, which the chief calls as operations on its device."""

from collections.abc import Callable, Sequence

import tensorflow as tf
from tensorflow.python.ops import gen_script_ops, script_ops


def offer(name: str, function: Callable) -> None:
    """Lets the chief call a function of this process.

    Args:
        name: The function's name, for `call`.
        function: Function of NumPy arrays; it returns an array.
    """
    # TensorFlow looks a Python operation's function up by its token, in the process that runs it.
    script_ops._py_funcs._funcs[_token(name)] = function


def call(name: str, arguments: Sequence[tf.Tensor], dtype: tf.DType) -> tf.Tensor:
    """Calls a function that the process of the current device offers.

    Arguments and result stay on that device if they are there.

    Args:
        name: The function's name.
        arguments: Arguments of the function.
        dtype: Dtype of the result.

    Raises:
        tf.errors.OpError: If the process offers no such function, or the function has failed.
    """
    return gen_script_ops.py_func(arguments, token=_token(name), Tout=[dtype])[0]


def _token(name: str) -> str:
    return f"tfdml/{name}"
