"""`Auto`: chooses a compressor, or none, by measurement."""

from collections.abc import Sequence
from typing import Any

import keras

from tfdml.compression.codecs.float16 import Float16
from tfdml.compression.codecs.power_sgd import PowerSGD
from tfdml.compression.codecs.qsgd import QSGD
from tfdml.compression.compressor import Compressor


@keras.saving.register_keras_serializable("tfdml")
class Auto(Compressor):
    """Compressor that uses the candidate with the shortest steps, or no compression.

    At the start it measures the link and the codecs, and begins with the candidate that a cost
    model predicts to be the fastest. Then whole steps are timed: with that candidate, with those
    predicted to be nearly as fast, and without compression if that has a chance. When the step time
    changes later, all are tried again. The ranks agree on every choice. Rank 0 prints the
    predictions and then the measurements.

    Args:
        candidates: Compressors to choose from, in addition to no compression.

    Raises:
        ValueError: If a candidate is not a compressor, is `Auto`, or replaces the optimizer's
            momentum.
    """

    def __init__(self, candidates: Sequence[Compressor] | None = None):
        if candidates is None:
            candidates = (Float16(), QSGD(8), QSGD(4), PowerSGD(4))
        self.candidates = list(candidates)
        for c in self.candidates:
            if not isinstance(c, Compressor) or isinstance(c, Auto) or c.replaces_momentum:
                raise ValueError(
                    f"`candidates` must be compressors that can be measured in turns, such as "
                    f"tfdml.compression.QSGD(8); not Auto, nor one that replaces the optimizer's "
                    f"momentum. Received: {c!r}."
                )
        if not self.candidates:
            raise ValueError(
                "`candidates` must name a compressor, such as [tfdml.compression.QSGD(8)], or be "
                "None for the default candidates. Received: candidates=[]."
            )

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {"candidates": [keras.saving.serialize_keras_object(c) for c in self.candidates]}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Auto":
        """Creates an instance from the dict that `get_config` returned."""
        return cls([keras.saving.deserialize_keras_object(c) for c in config["candidates"]])

    def __repr__(self) -> str:
        return f"Auto(candidates={self.candidates!r})"
