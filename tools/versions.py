"""Records which tests passed on which versions, and writes the table of `docs/versions.md`.

    python -m tools.versions results.xml    # adds a run of this environment
    python -m tools.versions                # only makes the table

`tools/test --versions` calls it after each run. A run replaces an earlier one on the same minor
versions. If several files have a test, such as one of repeated tests, the last counts.
"""

import collections
import json
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

from tfdml.horovod_build.requirements import installed_tensorflow

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "tools" / "versions.json"
PAGE = ROOT / "docs" / "versions.md"
_BEGIN, _END = "<!-- made by tools/versions.py -->\n", "<!-- end -->\n"

# A test's outcome by the child of its XML element; a passed test has none.
OUTCOMES = {"failure": "failed", "error": "failed", "skipped": "skipped"}
Run = dict[str, str | int]


def main(arguments: Sequence[str]) -> None:
    """Adds a run, if given, and writes the table."""
    runs = read()
    if arguments:
        new = run([Path(argument) for argument in arguments])
        runs = [r for r in runs if pair(r) != pair(new)] + [new]
        runs.sort(key=lambda r: [tuple(map(int, part.split("."))) for part in pair(r)])
        RUNS.write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), runs), encoding="utf-8")


def read() -> list[Run]:
    """Returns the newest run of each combination of versions."""
    return json.loads(RUNS.read_text(encoding="utf-8"))


def run(results: Sequence[Path]) -> Run:
    """Returns the results of a run from pytest's files, with the versions of this environment."""
    outcomes, suites = {}, [ElementTree.parse(file).getroot().find("testsuite") for file in results]
    for case in (case for suite in suites for case in suite.iter("testcase")):
        name = case.get("classname"), case.get("name")
        outcomes[name] = next(
            (OUTCOMES[part.tag] for part in case if part.tag in OUTCOMES), "passed"
        )
    counts = collections.Counter(outcomes.values())
    tensorflow = installed_tensorflow()
    return {
        "keras": metadata.version("keras"),
        "tensorflow": tensorflow.version,
        "distribution": tensorflow.distribution,
        "python": platform.python_version(),
        "horovod": metadata.version("horovod"),
        "folders": " ".join(sorted({n.split(".")[1] for n, _ in outcomes if n.count(".") > 1})),
        **{outcome: counts[outcome] for outcome in ("passed", "failed", "skipped")},
        "date": suites[-1].get("timestamp")[:10],
    }


def pair(run: Run) -> tuple[str, ...]:
    """Returns the minor versions of Keras, TensorFlow and Python that a run was on."""
    return tuple(minor(str(run[name])) for name in ("keras", "tensorflow", "python"))


def minor(version: str) -> str:
    """Returns the first two numbers of a version."""
    return ".".join(version.split(".")[:2])


def with_table(page: str, runs: Sequence[Run]) -> str:
    """Returns a page with the table of these runs in it."""
    before, rest = page.split(_BEGIN)
    return before + _BEGIN + table(runs) + _END + rest.partition(_END)[2]


def table(runs: Sequence[Run]) -> str:
    """Returns a line for each run."""
    lines = ["| Keras | TensorFlow | Python | on | passed | failed | folders of `tests/` |"]
    lines.append("|---|---|---|---|---|---|---|")
    for r in runs:
        tensorflow = f"{r['tensorflow']} (`{r['distribution']}`)"
        cells = (r["keras"], tensorflow, r["python"], r["date"], r["passed"], r["failed"])
        lines.append(f"| {' | '.join(map(str, cells))} | {r['folders'].replace(' ', ', ')} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(sys.argv[1:])
