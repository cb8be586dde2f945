"""Copies of this checkout, like a fresh clone plus the uncommitted changes."""

import functools
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def tracked_files() -> frozenset[str]:
    """Returns all files that git tracks or would add, relative to the checkout."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    names = [name for name in listed.split("\0") if name]
    return frozenset(n for n in names if (ROOT / n).is_file() and not n.startswith(".venv"))


def copy_of_the_checkout(target: Path) -> Path:
    """Copies all files that git tracks or would add; returns the copy."""
    for name in tracked_files():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name)
    return target
