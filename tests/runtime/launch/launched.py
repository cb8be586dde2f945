"""Runs `tfdml launch` with a small program."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

TFDML = [sys.executable, "-m", "tfdml.cli.main"]


def launch(
    *options: str,
    script: str = "",
    tmp_path: Path,
    timeout: float = 180,
    arguments: Sequence[str] = (),
    **environment,
):
    """Runs `tfdml launch` with a script of this text; returns the finished process."""
    program = tmp_path / "program.py"
    program.write_text(script)
    return subprocess.run(
        [*TFDML, "launch", *options, str(program), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **environment},
    )
