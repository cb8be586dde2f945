"""The timeline of one rank: what it did when, on its own clock, as a file of the rank."""

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

FORMAT = 1


class Kind:
    """Kinds of spans.

    The main thread's, one after the other: waiting for a batch, computing gradients, what is left
    of their exchange after that, and the update of the weights. With local updates, the rest of
    exchange is a synchronization after the update. Between steps its callbacks, the
    saves within them, and calls such as `evaluate`. Writes of checkpoints, in a thread of their
    own. Of each bucket of gradients: encoding, its exchanges, the sum that its owner makes between
    them, and decoding.
    """

    DATA = "data wait"
    COMPUTE = "compute"
    REST = "rest of exchange"
    UPDATE = "update"
    CALLBACK = "callback"
    CALL = "call"
    SAVE = "save"
    WRITE = "write"
    ENCODE = "encode"
    EXCHANGE = "exchange"
    ADD = "add"
    DECODE = "decode"


class Span(NamedTuple):
    """Something that a rank did.

    Attributes:
        kind: One of `Kind`.
        name: Name of the bucket, callback or the like; "" if the kind says all.
        begin: When it began, in seconds since 1970 on the rank's clock.
        end: When it ended.
        step: Number of the batch in the `fit`, from 1; None for what belongs to none.
        details: Further facts: `operation`, `bytes` and `ranks` of an exchange.
    """

    kind: str
    name: str
    begin: float
    end: float
    step: int | None = None
    details: dict[str, Any] = {}

    @property
    def seconds(self) -> float:
        """Its duration in seconds."""
        return self.end - self.begin


def short_name(span: Span) -> str:
    """Returns the name of an exchange, or of what a codec did with a bucket, for people.

    Args:
        span: The span.
    """
    name = span.name.removeprefix("gradients/")
    return name if span.kind == Kind.EXCHANGE else f"{span.kind} {name}"


class Clock(NamedTuple):
    """Difference between the rank's clock and rank 0's at some time; see `ClockReading`.

    Attributes:
        at: The time on the rank's clock, in seconds since 1970.
        offset: Seconds to add for the time on rank 0's clock.
        error: Largest error of `offset`, in seconds.
    """

    at: float
    offset: float
    error: float


@dataclasses.dataclass
class RankTimeline:
    """The timeline of one rank.

    Attributes:
        rank: The rank.
        size: Number of ranks of the job.
        host: Name of the rank's host.
        job: Text that tells the job and its `fit` from others: the same on all ranks.
        strategy: Name of the strategy's class.
        clocks: Differences from rank 0's clock before and after the steps.
        spans: Spans of the rank's activities, on its own clock.
    """

    rank: int
    size: int
    host: str
    job: str
    strategy: str
    clocks: list[Clock]
    spans: list[Span]

    def save(self, directory: str | Path) -> Path:
        """Writes the rank's file into a directory, and returns its path.

        Args:
            directory: Directory for the files of all ranks; made if it does not exist.
        """
        Path(directory).mkdir(parents=True, exist_ok=True)
        path = Path(directory, f"rank-{self.rank:04d}.json")
        content = {"format": FORMAT, **dataclasses.asdict(self)}
        # A file appears as a whole, so that a directory can be read while ranks write.
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(content, separators=(",", ":")), encoding="utf-8")
        partial.replace(path)
        return path

    @classmethod
    def load(cls, path: Path) -> "RankTimeline":
        """Reads a rank's file.

        Args:
            path: The file.

        Raises:
            ValueError: If it is not a file of a `Timeline`, or of a later version.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            number = content.pop("format")
            if number == FORMAT:
                content["clocks"] = [Clock(*clock) for clock in content["clocks"]]
                content["spans"] = [Span(*span) for span in content["spans"]]
                return cls(**content)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} must be a rank's file of `tfdml.callbacks.Timeline`. Received a file that "
                f"cannot be read as one: {error!r}. Record the timeline again."
            ) from error
        raise ValueError(
            f"{path} must have format {FORMAT}. Received: format {number!r}. Read it with the "
            f"version of tfdml that wrote it."
        )
