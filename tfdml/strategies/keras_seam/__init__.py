"""The seam between Keras and the strategies: all that replaces or imports parts of Keras's insides.

`seam` lists the functions that are replaced, `entry` and `hooks` decide what runs instead. The
subpackages follow Keras: `data` (what `fit` reads), `fit` (its loops and callbacks), `step`
(losses, gradients, optimizers), `parameter_servers` (what differs there). `recording` is what
`tfdml verify` adds.
"""

from tfdml.strategies.keras_seam.recording.devices import devices_of_run
from tfdml.strategies.keras_seam.recording.hooks import replica_hooks
from tfdml.strategies.keras_seam.seam import install
from tfdml.strategies.keras_seam.step.recomputing import recomputed

__all__ = ["devices_of_run", "install", "recomputed", "replica_hooks"]
