"""`tfdml.remat`: gradient checkpointing of a layer, a model or a function, as a block."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras

from tfdml.strategies import keras_seam


@keras.saving.register_keras_serializable("tfdml")
class Remat(keras.layers.Layer):
    """Layer that computes another one as a block, see `remat`.

    Args:
        layer: The layer, which may be a model. The block has its name.
        **kwargs: Arguments of `keras.layers.Layer`.

    Attributes:
        layer: The layer.
    """

    def __init__(self, layer: keras.Layer, **kwargs: Any):
        keras_seam.install()

        # With the layer's own arguments, which `Layer.__init__` looks at.
        @functools.wraps(layer.call)
        def call(*args: Any, **kwargs: Any) -> Any:
            return layer(*args, **kwargs)

        call.__qualname__ = layer.name
        self.call = keras_seam.recomputed(call)
        # The inner layer casts its inputs and variables itself.
        defaults = {"name": layer.name, "dtype": layer.dtype_policy, "autocast": False}
        super().__init__(**{**defaults, **kwargs})
        self.layer = layer
        self.supports_masking = layer.supports_masking

    def compute_mask(self, inputs: Any, previous_mask: Any) -> Any:
        """Returns the layer's mask."""
        return self.layer.compute_mask(inputs, previous_mask)

    def get_config(self) -> dict[str, Any]:
        """Returns the layer, for a file."""
        return {**super().get_config(), "layer": keras.saving.serialize_keras_object(self.layer)}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict | None = None) -> "Remat":
        """Makes the layer of a file."""
        layer = keras.saving.deserialize_keras_object(config["layer"], custom_objects)
        return cls(**{**config, "layer": layer})


def remat(target: keras.Layer | Callable) -> keras.Layer | Callable:
    """Returns the same layer, model or function, of which training keeps the inputs alone.

    What lies between its inputs and outputs is computed again when the gradient is taken. That
    saves the memory of its activations, and costs its forward pass once more. Losses, gradients and
    weights are the same. Blocks of several layers save most: between the blocks of a model, one
    tensor is kept for each, and only one block's activations exist at a time.

    ```python
    block = tfdml.remat(keras.Sequential([layers.Dense(512, "relu"), layers.Dense(128)]))
    outputs = inputs + block(inputs)

    @tfdml.remat
    def attention(queries, keys, values): ...
    ```

    Random numbers must come from `keras.random`, outside of loops of the graph, and other state
    from Keras's variables. From its first use on, `keras.remat` and `keras.RematScope` have these
    properties, too.

    Args:
        target: A layer, a model that is part of another one, or a function of tensors. Arguments
            and results may be structures that contain anything else, too.

    Returns:
        For a layer or a model, a layer of the same name and the same variables, which is saved and
        loaded with the model that contains it. For a function, a function.

    Raises:
        ValueError: If `target` is something else.

    Reference:
        Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174.
    """
    keras_seam.install()
    if isinstance(target, Remat):
        return target
    if isinstance(target, keras.Layer):
        return Remat(target)
    if inspect.isclass(target) or not callable(target):
        raise ValueError(
            f"`target` must be a layer, a model or a function. Received: target={target!r}. "
            f"{'Make an instance of the class first.' if inspect.isclass(target) else ''}".strip()
        )
    return keras_seam.recomputed(target)
