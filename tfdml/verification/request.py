"""Request to record a run's first steps, which `tfdml verify` passes on by the environment."""

import dataclasses
import json
from pathlib import Path

from tfdml import topology

_VARIABLE = "TFDML_VERIFY"


@dataclasses.dataclass(frozen=True)
class Request:
    """Order to record the first train steps of a script's first model, and to end it then.

    Attributes:
        directory: Directory of the run's records, one for each rank.
        steps: Number of steps to record.
        initial: File of the initial weights: a run that does not find it writes its own there.
        perturbs: Whether inputs and initial weights are changed in the last place.
        float64: Whether layers compute in float64.
        compresses: Whether gradients are compressed as the script says; else they are not.
        devices: Number of devices of a `MirroredStrategy`.
    """

    directory: Path
    steps: int
    initial: Path
    perturbs: bool = False
    float64: bool = False
    compresses: bool = False
    devices: int = 1

    def variables(self) -> dict[str, str]:
        """Returns the environment variables by which a process receives the request."""
        return {_VARIABLE: json.dumps(dataclasses.asdict(self), default=str)}


def requested() -> Request | None:
    """Returns the request to this process; None if it trains as usual."""
    text = topology.setting(_VARIABLE)
    if not text:
        return None
    values = json.loads(text)
    paths = {name: Path(values[name]) for name in ("directory", "initial")}
    return Request(**{**values, **paths})
