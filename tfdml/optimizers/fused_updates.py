"""Variable updates in one pass over the values, because memory bandwidth limits their speed."""

from typing import Any

import keras
import tensorflow as tf


def subtract(variable: Any, rate: Any, update: tf.Tensor) -> None:
    """Subtracts `rate * update` from a variable.

    Args:
        variable: A Keras or TensorFlow variable; in the update of a mirrored one, this device's
            component.
        rate: A scalar: a Python number, or a tensor of any float dtype.
        update: A tensor of the variable's shape and dtype.
    """
    variable = _tensorflow(variable)
    # `tf.cast` would round a Python number to float32 first.
    dtype = variable.dtype
    rate = tf.cast(rate, dtype) if tf.is_tensor(rate) else tf.constant(rate, dtype)
    tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=rate, delta=update)


def update_moments(
    m: Any, v: Any, gradient: tf.Tensor, beta_1: float, beta_2: float, variable: Any
) -> None:
    """Updates the moving averages of gradients and of squared gradients.

    In half precision `beta_2` itself would round to 1, but 1 - beta_2 does not: there the update
    takes several passes.

    Args:
        m: Mean of gradients.
        v: Mean of squared gradients.
        gradient: The gradient, of the means' shape and dtype.
        beta_1: Decay rate of `m`; in full precision it is rounded to the dtype.
        beta_2: Decay rate of `v`, likewise.
        variable: The variable that the gradient belongs to. It is not changed.
    """
    m, v, variable = _tensorflow(m), _tensorflow(v), _tensorflow(variable)
    if gradient.dtype.size < 4:
        subtract(m, 1 - beta_1, m - gradient)
        subtract(v, 1 - beta_2, v - tf.square(gradient))
        return
    number = lambda value: tf.constant(value, gradient.dtype)  # noqa: E731
    # Adam's fused operation at a learning rate of 0 updates only the means.
    tf.raw_ops.ResourceApplyAdam(
        var=variable.handle,
        m=m.handle,
        v=v.handle,
        beta1_power=number(0),
        beta2_power=number(0),
        lr=number(0),
        beta1=number(beta_1),
        beta2=number(beta_2),
        epsilon=number(1),
        grad=gradient,
    )


def _tensorflow(variable: Any) -> Any:
    return variable.value if isinstance(variable, keras.Variable) else variable
