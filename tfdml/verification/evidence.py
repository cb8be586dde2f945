"""Evidence on the first tensor that differs between runs, from which its cause is recognised."""

import dataclasses
from typing import Any

from tfdml.verification import record
from tfdml.verification.aligning import order_of_rows
from tfdml.verification.comparing import Comparison, Tensor, layer_of


@dataclasses.dataclass(frozen=True)
class Cause:
    """The cause of a difference.

    Attributes:
        name: Short name for programs.
        words: Description of the mistake, as sentences.
        fix: Change that corrects it, as sentences.
    """

    name: str
    words: str
    fix: str


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Evidence on the first tensor that differs.

    Attributes:
        comparison: The comparison.
        first: The tensor.
    """

    comparison: Comparison
    first: Tensor

    @property
    def kind(self) -> str:
        """The tensor's kind."""
        return self.first.key[1]

    @property
    def name(self) -> str:
        """The tensor's name."""
        return self.first.key[2]

    @property
    def layer(self) -> dict[str, Any]:
        """Facts of the layer of an output, from all ranks."""
        name, found = layer_of(self.name), {}
        for run in (self.comparison.one, self.comparison.several):
            for rank in run.records:
                found |= rank.facts["layers"].get(name, {})
        return found

    @property
    def drawn(self) -> str | None:
        """Description of the pipeline's stage that draws without a seed; None without one."""
        runs = (self.comparison.one, self.comparison.several)
        found = [r.facts.get("data", {}).get("drawn") for run in runs for r in run.records]
        return next(filter(None, found), None)

    @property
    def repeats(self) -> bool:
        """True if one process has the same rows when it runs again."""
        step, one, again = self.first.key[0], self.comparison.one, self.comparison.again
        return order_of_rows(again.rows(step), one.rows(step)) is not None

    @property
    def number_of_replicas(self) -> int:
        """The number of replicas."""
        return self.comparison.several.facts["replicas"]

    @property
    def differs_by_rank(self) -> bool:
        """True if the first replica is right and others are not."""
        return bool(self.first.replicas) and 0 not in self.first.replicas

    @property
    def only_tables_of_repeated_rows_differ(self) -> bool:
        """True if gradients or weights differ of tables alone whose rows a batch repeats.

        Others of the step must be the same: clipping, for one, changes all gradients.
        """
        step, kind, _ = self.first.key
        if kind not in (record.GRADIENT, record.WEIGHT):
            return False
        alike = [t for t in self.comparison.tensors if t.key[:2] == (step, kind)]
        tables = self.comparison.one.facts.get("repeated_rows", ())
        differing = [t.key[2] in tables for t in alike if t.differs]
        return all(differing) and len(differing) < len(alike)

    def numbers(self) -> tuple[float, list[float]] | None:
        """Returns the reference and each replica's number; None if the tensor has several."""
        key, several = self.first.key, self.comparison.several
        values = [e.values for e in several.tensors.get(key, ())]
        reference = self.comparison.one.tensors.get(key)
        if not reference or any(v.size != 1 for v in (reference[0].values, *values)):
            return None
        return float(reference[0].values.item()), [float(v.item()) for v in values]
