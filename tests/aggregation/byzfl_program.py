"""Combines vectors by ByzFL's rules: `.venv-byzfl/bin/python -m tests.aggregation.byzfl_program`.

Reads IN, an `.npz` file with `steps` of shape [steps, ranks, numbers], `trimmed`, `radius` and
`iterations`; writes OUT, one with `trimmed` and `clipped` of shape [steps, numbers].
"""

import sys

import numpy as np

from tools.bench.robust.byzfl_rules import import_rules


def main(source: str, target: str) -> None:
    """Combines the vectors of each step.

    Args:
        source: Path of the input.
        target: Path of the output.
    """
    given, rules = np.load(source), import_rules()
    trimmed = rules.TrMean(f=int(given["trimmed"]))
    # It keeps the last result, as the center of the next step.
    clipped = rules.CenteredClipping(L=int(given["iterations"]), tau=float(given["radius"]))
    results = [(trimmed(vectors), np.array(clipped(vectors))) for vectors in given["steps"]]
    one, other = (np.stack(values) for values in zip(*results, strict=True))
    np.savez(target, trimmed=one, clipped=other)


if __name__ == "__main__":
    main(*sys.argv[1:])
