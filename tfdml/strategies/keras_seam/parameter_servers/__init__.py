"""Patches of Keras 3.14 and 3.15 that only parameter servers need.

They are installed with the first `ParameterServerStrategy`. Patches for replicas and parameter
servers are in `entry`.
"""

import tensorflow as tf

from tfdml.strategies.keras_seam.parameter_servers import exporting, partitions, steps
from tfdml.strategies.keras_seam.parameter_servers.hooks import ServerHooks
from tfdml.strategies.keras_seam.replacing import Replacement, put_in_place
from tfdml.strategies.parameter_server.partition import as_array

__all__ = ["REPLACEMENTS", "ServerHooks", "install"]

REPLACEMENTS: list[Replacement] = [
    *steps.REPLACEMENTS,
    *partitions.REPLACEMENTS,
    *exporting.REPLACEMENTS,
]


def install() -> None:
    """Installs the replacements, once."""
    put_in_place(REPLACEMENTS)
    # NumPy, which Keras uses to write files, would treat it as a sequence.
    tf.__internal__.distribute.ShardedVariable.__array__ = as_array
