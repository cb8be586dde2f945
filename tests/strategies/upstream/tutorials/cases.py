"""Cases run by ranks: a tutorial's program, run as `python program.py`, and strategy aliases."""

import os
import sys
from pathlib import Path

import tensorflow as tf

import tfdml


def run(program: str, directory: str, *arguments: str) -> dict:
    """Runs a program in a directory; returns its variable `outcome`.

    Args:
        program: Path of the program.
        directory: Working directory.
        *arguments: Command line arguments.
    """
    os.chdir(directory)
    sys.argv = [program, *arguments]
    module = {"__name__": "__main__", "__file__": program}
    exec(compile(Path(program).read_text(), program, "exec"), module)
    return module["outcome"]


def experimental_strategy() -> tuple:
    """Returns the options set by the arguments of TensorFlow's experimental strategy."""
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec({}))
    ring = tfdml.experimental.CommunicationImplementation.RING
    strategy = tfdml.experimental.MultiWorkerMirroredStrategy(ring, resolver)
    assert isinstance(strategy, tfdml.MultiWorkerMirroredStrategy)
    communication = strategy.extended.options.communication_options
    return communication, type(strategy.cluster_resolver).__name__
