"""`tf.distribute`'s names as attributes of `tfdml`, so that a script can swap one for the other.

Strategies and servers are tfdml's own; everything else is TensorFlow's.
"""

from typing import Any

import tensorflow as tf

from tfdml import strategies
from tfdml.strategies.parameter_server.cluster.own_server import Server

# These have one replica, so TensorFlow's results cannot differ from one device's.
_AS_THEY_ARE = ("Strategy", "OneDeviceStrategy")


class MultiWorkerMirroredStrategy(strategies.MultiWorkerMirroredStrategy):
    """`MultiWorkerMirroredStrategy` with the signature of TensorFlow's experimental class.

    Args:
        communication: A `tf.distribute.experimental.CommunicationImplementation`.
        cluster_resolver: Resolver that describes the cluster; reads `TF_CONFIG` by default.
    """

    def __init__(
        self,
        communication: tf.distribute.experimental.CommunicationImplementation = (
            tf.distribute.experimental.CommunicationImplementation.AUTO
        ),
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
    ):
        options = tf.distribute.experimental.CommunicationOptions(implementation=communication)
        super().__init__(cluster_resolver, options)


class Names:
    """View of a `tf.distribute` module in which tfdml's classes replace TensorFlow's.

    Args:
        module: TensorFlow's module.
        own: tfdml's objects by name.
    """

    def __init__(self, module: Any, own: dict[str, Any]):
        self._module = module
        self._own = own

    def __getattr__(self, name: str) -> Any:
        """Returns tfdml's or TensorFlow's object of that name.

        Args:
            name: The attribute asked for.

        Raises:
            AttributeError: If neither has that name, or if it is one of TensorFlow's strategies
                that does not promise one device's results, as tfdml's do.
        """
        if name in self._own:
            return self._own[name]
        if name.endswith("Strategy") and name not in _AS_THEY_ARE and hasattr(self._module, name):
            raise AttributeError(
                f"tfdml has no `{name}`. Its strategies reproduce the results of one device, "
                f"which TensorFlow's strategy of this name does not promise. Write "
                f"`tf.distribute.` before it."
            )
        return getattr(self._module, name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(self._module), *self._own})


_experimental = Names(
    tf.distribute.experimental,
    {
        "MultiWorkerMirroredStrategy": MultiWorkerMirroredStrategy,
        "ParameterServerStrategy": strategies.ParameterServerStrategy,
    },
)
_names = Names(tf.distribute, {"Server": Server, "experimental": _experimental})


def find(name: str) -> Any:
    """Returns the object for `tfdml.NAME` if tfdml itself does not define that name.

    Args:
        name: A name in `tf.distribute`.

    Raises:
        AttributeError: If `Names` has no such attribute.
    """
    try:
        return getattr(_names, name)
    except AttributeError as error:
        if hasattr(tf.distribute, name):
            raise
        raise AttributeError(
            f"module 'tfdml' has no attribute {name!r}, and neither has `tf.distribute`"
        ) from error
