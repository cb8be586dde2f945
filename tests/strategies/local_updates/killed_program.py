"""Training with local updates, of which a rank kills itself once.

    killed_program.py DIRECTORY RANK STEP

Rank RANK kills itself after STEP steps, unless DIRECTORY says that it did. Rank 0 writes the
weights of the end to DIRECTORY.
"""

import os
import signal
import sys
from pathlib import Path

import keras
import numpy as np

from tests.strategies.local_updates import cases
from tests.strategies.local_updates.test_checkpoints import METHOD, OPTIONS
from tfdml.topology import launched

directory, faulty, step = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])


class Killing(keras.callbacks.Callback):
    """Kills its own process after some steps, once."""

    def on_train_batch_end(self, batch, logs=None):
        mark = directory / "killed"
        if launched().rank == faulty and batch + 1 == step and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


result = cases.resumed(str(directory / "run"), METHOD, callbacks=[Killing()], **OPTIONS)
if launched().rank == 0:
    np.savez(directory / "end.npz", *result["weights"])
