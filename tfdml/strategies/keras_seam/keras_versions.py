"""Handling of differences between the supported Keras versions that matter to replicas.

`tfdml/known_sources.json` shows which functions differ between releases. Some differ but need
nothing here, because the replacement calls Keras's own: `train_on_batch`, which first resets
metrics in 3.15, and `deserialize_keras_object`, which checks more.
"""

import inspect

import keras
from keras.src.utils.naming import auto_name


def distinct_name(optimizer: keras.Optimizer) -> str:
    """Returns a unique name of an optimizer, for the names of its exchanges.

    Keras 3.15 names two SGD optimizers of a program `sgd` and `sgd_1`. Keras 3.14 names both `SGD`;
    so does any version if `name` has a default in the optimizer's class. Such optimizers get names
    like 3.15's here, in the order of their first exchange, which is the same on all ranks.
    """
    default = inspect.signature(type(optimizer)).parameters.get("name")
    if default is None or optimizer.name != default.default:
        return optimizer.name
    if not hasattr(optimizer, "_tfdml_name"):
        optimizer._tfdml_name = auto_name(optimizer.name)
    return optimizer._tfdml_name
