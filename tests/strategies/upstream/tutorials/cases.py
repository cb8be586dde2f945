"""What ranks run: a tutorial's program, as `python program.py` does; a strategy by another name."""

import os
import sys
from pathlib import Path

import tensorflow as tf

import tfdml


def run(program: str, directory: str, *arguments: str) -> dict:
    """Runs a program in a directory; returns what it calls its outcome.

    Args:
        program: The program's path.
        directory: Its working directory.
        *arguments: Its command line.
    """
    os.chdir(directory)
    sys.argv = [program, *arguments]
    module = {"__name__": "__main__", "__file__": program}
    exec(compile(Path(program).read_text(), program, "exec"), module)
    return module["outcome"]


def experimental_strategy() -> tuple:
    """What a strategy is told by the arguments of TensorFlow's experimental one."""
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec({}))
    ring = tfdml.experimental.CommunicationImplementation.RING
    strategy = tfdml.experimental.MultiWorkerMirroredStrategy(ring, resolver)
    assert isinstance(strategy, tfdml.MultiWorkerMirroredStrategy)
    told = strategy.extended.options.communication_options
    return told, type(strategy.cluster_resolver).__name__
