"""What a rank of `tfdml test` tells the command, as marked lines of its standard output.

Standard output is the one way that a rank has on any machine: by ssh, and through `horovodrun`.
"""

import dataclasses
import json
import re
import sys

_EVENT = re.compile(r"<tfdml-test (\{[^\n]*?\})>")


@dataclasses.dataclass(frozen=True)
class Event:
    """That a rank begins a run, or has ended it.

    Attributes:
        run: The run's name.
        rank: The rank.
        losses: Of each epoch; empty for a run that begins.
        samples_per_second: Of all ranks together, in the epochs after the first.
        digests: Of the weights, for each replica of this process.
        weights: All weights as float32, in base64; of rank 0 only.
    """

    run: str
    rank: int = 0
    losses: list[float] = dataclasses.field(default_factory=list)
    samples_per_second: float = 0.0
    digests: list[str] = dataclasses.field(default_factory=list)
    weights: str = ""

    @property
    def is_end(self) -> bool:
        """Whether the run has ended."""
        return bool(self.losses)

    def send(self) -> None:
        """Prints it, in one piece: ranks may share a pipe."""
        sys.stdout.write(f"<tfdml-test {json.dumps(dataclasses.asdict(self))}>\n")
        sys.stdout.flush()


def split(line: str) -> tuple[list[Event], str]:
    """Returns the events in a line of output, and what else is in it."""
    events = [Event(**json.loads(found)) for found in _EVENT.findall(line)]
    return events, _EVENT.sub("", line)
