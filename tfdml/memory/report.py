"""The result of an estimate: a table of choices and what each takes on a rank."""

import dataclasses
from pathlib import Path
from typing import Any

from tfdml.reports import columns, in_words

# The parts of a rank's memory, in the order of the table.
PARTS = ("weights", "gradients", "slots", "activations", "exchange", "residuals")

# What a choice may switch on, by attribute, and its words in the table.
_SWITCHES = {
    "sharding": "sharding",
    "divided_tables": "divided tables",
    "checkpointing": "checkpointing",
}


@dataclasses.dataclass(frozen=True)
class Choice:
    """A number of ranks, what is switched on, and a rank's bytes with it.

    Attributes:
        ranks: The number of ranks: of replicas, each on a device of its own.
        sharding: Whether each rank holds 1/N of the slots.
        checkpointing: Whether activations are computed again in the backward pass, by blocks.
        weights: All of the model's variables, of divided tables those rows that the rank has.
        gradients: Gradients, and those that are accumulated for a later update.
        slots: The optimizer's variables; with `local_updates` also the last common weights and the
            outer optimizer's variables.
        activations: The batch, what the forward pass keeps for the backward pass, and what the
            backward pass takes besides gradients.
        exchange: Sums of gradients, encoded gradients, and rows of divided tables on their way,
            if all are in flight at once.
        residuals: State that compression keeps from step to step, in bytes.
        peak: Most bytes at one moment. It is less than the sum of the parts: activations are
            given up while gradients appear.
        divided_tables: Whether each rank holds 1/N of the large embedding tables, and their slots.
    """

    ranks: int
    sharding: bool
    checkpointing: bool
    weights: int
    gradients: int
    slots: int
    activations: int
    exchange: int
    residuals: int
    peak: int
    divided_tables: bool = False

    @property
    def name(self) -> str:
        """The ranks and what is switched on, in words."""
        used = [words for name, words in _SWITCHES.items() if getattr(self, name)]
        used = [", ".join(used[:-1]), *used[-1:]] if len(used) > 2 else used
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        return " with ".join([ranks, *filter(None, [" and ".join(used)])])


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """Bytes that training takes on a rank, by choice. `str()` is a table.

    Attributes:
        model: The model's name.
        batch_size: Rows of a global batch.
        blocks: Number of blocks that checkpointing is estimated for.
        choices: The choices: fewer ranks first, and for each number of ranks what costs no time
            before what does. Divided tables are among them if the model has large ones.
        notes: Sentences on tensors that the estimate leaves out or does not know.
    """

    model: str
    batch_size: int
    blocks: int
    choices: tuple[Choice, ...]
    notes: tuple[str, ...] = ()

    def fits(self, memory: float, ranks: int | None = None) -> Choice | None:
        """Returns the first choice whose peak fits; None if none does.

        Args:
            memory: Bytes that a rank's device has for training.
            ranks: The number of ranks; None for any in the table.

        Raises:
            ValueError: If `memory` is not positive, or the table does not have that many ranks.
        """
        if not memory > 0:
            raise ValueError(
                f"`memory` must be a positive number of bytes. Received: memory={memory!r}. "
                f"16 GB are 16e9."
            )
        known = sorted({choice.ranks for choice in self.choices})
        if ranks is not None and ranks not in known:
            raise ValueError(
                f"`ranks` must be a number of the table. Received: ranks={ranks!r}, and the table "
                f"has {', '.join(map(str, known))}. Pass `ranks=[{ranks}]` to `estimate_memory`."
            )
        for choice in self.choices:
            if choice.peak <= memory and ranks in (None, choice.ranks):
                return choice
        return None

    def as_dict(self) -> dict[str, Any]:
        """Returns the report as lists, dicts, texts and numbers, which JSON can hold."""
        return dataclasses.asdict(self)

    def plot(self, path: str | Path) -> None:
        """Writes a bar plot of the choices.

        Args:
            path: The file, of a format that matplotlib writes: .png, .svg, .pdf.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        from tfdml.memory.plot import write_plot

        write_plot(self, path)

    def __str__(self) -> str:
        # Most models have no large tables.
        switches = {
            name: words
            for name, words in _SWITCHES.items()
            if name != "divided_tables" or any(c.divided_tables for c in self.choices)
        }
        heads = ("ranks", *switches.values(), *PARTS, "peak")
        rows = [
            [
                str(c.ranks),
                *("yes" if getattr(c, name) else "-" for name in switches),
                *(in_words(getattr(c, part)) for part in (*PARTS, "peak")),
            ]
            for c in self.choices
        ]
        lines = columns(heads, rows)
        title = f"{self.model}, global batch of {self.batch_size}: bytes on each rank"
        return "\n".join([title, "", *lines, *([""] if self.notes else []), *self.notes])
