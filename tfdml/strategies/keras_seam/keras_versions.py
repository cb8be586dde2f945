"""What the supported versions of Keras do differently, where it matters to replicas.

`tfdml/known_sources.json` shows which functions are others in which release. Those that are, but
need nothing here, go on to Keras's own: `train_on_batch`, which resets metrics first in 3.15, and
`deserialize_keras_object`, which checks more.
"""

import inspect

import keras
from keras.src.utils.naming import auto_name


def distinct_name(optimizer: keras.Optimizer) -> str:
    """Returns an optimizer's name, or one that no other has: exchanges are called by it.

    Keras 3.15 calls two optimizers of a program `sgd` and `sgd_1`. Keras 3.14 calls both `SGD`, as
    any version does with those of a class whose `name` has a default. They get 3.15's names here,
    in the order of their first exchange, which is the same on all ranks.
    """
    default = inspect.signature(type(optimizer)).parameters.get("name")
    if default is None or optimizer.name != default.default:
        return optimizer.name
    if not hasattr(optimizer, "_tfdml_name"):
        optimizer._tfdml_name = auto_name(optimizer.name)
    return optimizer._tfdml_name
