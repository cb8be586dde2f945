"""Checks that what sharding cannot do is refused, with the way out."""

import pytest

import tfdml
from tests.strategies.sharded import cases

REFUSED = {
    "h5": "`filepath` must end in .keras",
    "built_elsewhere": "must be built in the scope of a strategy with `sharding`",
    "swap": "`SwapEMAWeights` must not be used with `sharding`",
    "idle_rank": "every rank must own a part of the variables of an update",
    "distribution": "`keras.distribution.set_distribution` must not be called",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(ranks, what):
    for message in ranks(2).run(cases.error_of, what):
        assert REFUSED[what] in message


@pytest.mark.parametrize(
    "cls", [tfdml.HorovodStrategy, tfdml.MultiWorkerMirroredStrategy], ids=["horovod", "workers"]
)
def test_wrong_arguments_are_refused(cls):
    with pytest.raises(ValueError, match="`sharding` must be a `tfdml.Sharding`, or None"):
        cls(sharding=True)
    for compression in (
        "powersgd",
        "randomk",
        tfdml.compression.Auto([tfdml.compression.PowerSGD(4)]),
    ):
        with pytest.raises(ValueError, match="`compression` must encode the part of each owner"):
            cls(sharding=tfdml.Sharding(), compression=compression)
    with pytest.raises(ValueError, match="`optimizer_state` must be True or False"):
        tfdml.Sharding(optimizer_state="yes")
