"""Events that ranks of `tfdml test` send to the command as marked lines of standard output.

Standard output reaches the command from every machine, by ssh and through `horovodrun`. The
processes in between write the lines of several ranks to one pipe, where only short lines stay in
one piece. So weights are sent in parts.
"""

import dataclasses
import json
import re
import sys

_MARKED = re.compile(r"<tfdml-test (\{[^\n]*?\})>")
# Characters of a part: with the marks and a rank's prefix, less than PIPE_BUF, which is 4,096.
_PART = 3000


@dataclasses.dataclass(frozen=True)
class Event:
    """Start or end of a run on a rank.

    Attributes:
        run: Name of the run.
        rank: Rank that sends the event.
        losses: Loss of each epoch; empty at the start of a run.
        samples_per_second: Throughput of all ranks together, in the epochs after the first.
        digests: Digest of the weights of each replica of this process.
        weights: All weights as float32, in base64; from rank 0 only.
    """

    run: str
    rank: int = 0
    losses: list[float] = dataclasses.field(default_factory=list)
    samples_per_second: float = 0.0
    digests: list[str] = dataclasses.field(default_factory=list)
    weights: str = ""

    @property
    def is_end(self) -> bool:
        """True if the event is the end of a run."""
        return bool(self.losses)

    def send(self) -> None:
        """Prints the event, in lines short enough to stay in one piece in a pipe."""
        for begin in range(0, len(self.weights), _PART):
            _print({"part_of": self.run, "text": self.weights[begin : begin + _PART]})
        _print(dataclasses.asdict(self) | {"weights": ""})


class Reader:
    """Parser of events in the lines of a job's output."""

    def __init__(self) -> None:
        self._parts: dict[str, str] = {}

    def read(self, line: str) -> tuple[list[Event], str]:
        """Returns the events that a line completes, and the rest of the line."""
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


def _print(fields: dict) -> None:
    sys.stdout.write(f"<tfdml-test {json.dumps(fields)}>\n")
    sys.stdout.flush()
