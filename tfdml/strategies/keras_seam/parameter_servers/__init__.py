"""Where parameter servers enter Keras 3.14 and 3.15: what replicas of one job do not need.

It is put in place with the first `ParameterServerStrategy`. What both need is in `entry`.
"""

import tensorflow as tf

from tfdml.strategies.keras_seam.parameter_servers import partitions, steps
from tfdml.strategies.keras_seam.parameter_servers.hooks import ServerHooks
from tfdml.strategies.keras_seam.replacing import Replacement, put_in_place
from tfdml.strategies.parameter_server.partition import as_array

__all__ = ["REPLACEMENTS", "ServerHooks", "install"]

REPLACEMENTS: list[Replacement] = [*steps.REPLACEMENTS, *partitions.REPLACEMENTS]


def install() -> None:
    """Puts this part of the seam in place, once."""
    put_in_place(REPLACEMENTS)
    # NumPy, by which Keras writes files, would take it for a sequence.
    tf.__internal__.distribute.ShardedVariable.__array__ = as_array
