"""The methods that are compared in the trial."""

import keras

from tools.bench.local_updates.simulation import Method


def nesterov() -> keras.Optimizer:
    """Returns DiLoCo's outer optimizer.

    Reference:
        Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models",
        arXiv:2311.08105.
    """
    return keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)


SYNCHRONOUS = "synchronous"
METHODS = {
    SYNCHRONOUS: Method(synchronous=1.0),
    **{f"LocalSGD({every})": Method(every) for every in (4, 16, 64)},
    **{f"DiLoCo({every})": Method(every, nesterov) for every in (16, 50, 200)},
    "post-local SGD(16)": Method(16, synchronous=0.5),
}
