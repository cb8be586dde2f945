"""Known failures of Keras's tests in a strategy's scope, read and compared with a run."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tools.keras_tests.job import Outcome

FILE = Path(__file__).with_name("exclusions.txt")
CATEGORIES = {
    "another strategy": "The test makes a strategy of its own inside the scope.",
    "refused": "What the test does cannot be done, and is refused with a message.",
    "rank 0": "The test looks on every rank for what rank 0 alone does.",
    "replica": "The test counts, or looks at, what each replica has for itself.",
}


@dataclasses.dataclass(frozen=True)
class Exclusion:
    """Line of the file.

    Attributes:
        test: Test as named by pytest from `keras/src`; a final `*` matches any rest.
        strategies: Strategies under which it fails: `mirrored`, or `mirrored/3` for 3 replicas.
        category: One of `CATEGORIES`.
        reason: Reason of the failure.
        link: Page that documents it for users.
    """

    test: str
    strategies: tuple[str, ...]
    category: str
    reason: str
    link: str

    def covers(self, test: str, strategy: str, replicas: int) -> bool:
        """Returns whether a test's failure under a strategy is this one."""
        if not {strategy, f"{strategy}/{replicas}"} & set(self.strategies):
            return False
        return test.startswith(self.test[:-1]) if self.test.endswith("*") else test == self.test


def read(file: Path = FILE) -> list[Exclusion]:
    """Returns the file's exclusions.

    Raises:
        ValueError: If a line does not have five fields between bars, or its category is unknown.
    """
    found = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        fields = [field.strip() for field in line.split("|")]
        if len(fields) != 5 or fields[2] not in CATEGORIES:
            raise ValueError(
                f"A line of {file.name} must be `test | strategies | category | reason | link`, "
                f"with a category of {', '.join(CATEGORIES)}. Received, in line {number}: {line}"
            )
        test, strategies, *rest = fields
        found.append(Exclusion(test, tuple(strategies.split()), *rest))
    return found


def problems(
    outcomes: Mapping[str, Outcome],
    plain: Mapping[str, Outcome],
    exclusions: Sequence[Exclusion],
    strategy: str,
    replicas: int,
) -> Iterator[str]:
    """Yields the differences between a run and the exclusions.

    Args:
        outcomes: Outcomes of the tests in the strategy's scope.
        plain: Outcomes of the failed tests without a strategy.
        exclusions: Exclusions of the file.
        strategy: Name of the strategy.
        replicas: Number of replicas.
    """
    for test, end in sorted(outcomes.items()):
        listed = [e for e in exclusions if e.covers(test, strategy, replicas)]
        fails_plain = plain.get(test, end).outcome != "passed" and test in plain
        if end.outcome == "failed" and not fails_plain and not listed:
            yield f"{test} fails, and is not listed:\n{end.message}"
        if end.outcome == "failed" and fails_plain and listed:
            yield f"{test} is listed, and fails without a strategy, too."
    for exclusion in exclusions:
        ends = [o.outcome for t, o in outcomes.items() if exclusion.covers(t, strategy, replicas)]
        if ends and "failed" not in ends:
            yield f"{exclusion.test} is listed, and passes."
