"""Gathering of strings from all ranks."""

import numpy as np
import tensorflow as tf

from tfdml.collectives.collective import Collective


def gather_texts(collective: Collective, text: str, name: str) -> list[str]:
    """Returns the texts of all ranks, in rank order.

    Args:
        collective: Collective that moves tensors between processes.
        text: This rank's text.
        name: Prefix of the exchanges' names.
    """
    own = text.encode()
    lengths = collective.all_gather(tf.constant([len(own)], tf.int64), f"{name}/lengths")
    joined = collective.all_gather(tf.constant(list(own), tf.uint8), f"{name}/texts")
    joined, ends = bytes(joined.numpy().tolist()), np.cumsum(lengths.numpy())
    return [
        joined[end - length : end].decode()
        for length, end in zip(lengths.numpy(), ends, strict=True)
    ]
