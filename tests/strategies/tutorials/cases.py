"""Runs a tutorial's program in a rank, as `python program.py` does."""

import os
import sys
from pathlib import Path


def run(program: str, directory: str, *arguments: str) -> dict:
    """Runs a program in a directory; returns what it calls its outcome.

    Args:
        program: The program's path.
        directory: Its working directory.
        *arguments: Its command line.
    """
    os.chdir(directory)
    sys.argv = [program, *arguments]
    module = {"__name__": "__main__", "__file__": program}
    exec(compile(Path(program).read_text(), program, "exec"), module)
    return module["outcome"]
