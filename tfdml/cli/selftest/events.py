"""What a rank of `tfdml test` tells the command, as marked lines of its standard output.

Standard output is the one way that a rank has on any machine: by ssh, and through `horovodrun`. The
processes on the way write the lines of several ranks into one pipe, where only short ones stay in
one piece. So weights are sent in parts.
"""

import dataclasses
import json
import re
import sys

_MARKED = re.compile(r"<tfdml-test (\{[^\n]*?\})>")
# With the marks, and a rank's prefix, less than PIPE_BUF, which is 4,096.
_PART = 3000


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
        """Prints it, in lines that a pipe keeps in one piece."""
        for begin in range(0, len(self.weights), _PART):
            _print({"part_of": self.run, "text": self.weights[begin : begin + _PART]})
        _print(dataclasses.asdict(self) | {"weights": ""})


class Reader:
    """Reads events from the lines of a job's output."""

    def __init__(self) -> None:
        self._parts: dict[str, str] = {}

    def read(self, line: str) -> tuple[list[Event], str]:
        """Returns the events that a line completes, and what else is in it."""
        events = []
        for found in map(json.loads, _MARKED.findall(line)):
            if "part_of" in found:
                run = found["part_of"]
                self._parts[run] = self._parts.get(run, "") + found["text"]
                continue
            if found["rank"] == 0 and found["losses"]:
                found["weights"] = self._parts.pop(found["run"], "")
            events.append(Event(**found))
        return events, without_events(line)


def without_events(text: str) -> str:
    """Returns a text without the marked parts."""
    return _MARKED.sub("", text)


def _print(told: dict) -> None:
    sys.stdout.write(f"<tfdml-test {json.dumps(told)}>\n")
    sys.stdout.flush()
