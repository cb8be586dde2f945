"""Runs commands in the checkout; fixtures of environments that lack packages or commands."""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run_python(*arguments: str, python: str = sys.executable, timeout: float = 120, **variables):
    """Runs Python in the checkout; `variables` are added to the environment."""
    return subprocess.run(
        [python, *arguments],
        cwd=ROOT,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.fixture
def tfdml_command() -> Callable[..., subprocess.CompletedProcess]:
    """Returns a function that runs `tfdml` with arguments and variables."""

    def run(*arguments: str, **options):
        return run_python("-m", "tfdml.cli.main", *arguments, **options)

    return run


@pytest.fixture(scope="session")
def environment_without(tmp_path_factory) -> Callable[..., str]:
    """Returns a function that makes an environment like this one, without some packages.

    The environment is real: its own `python`, and links to all installed packages but those
    whose name begins with one of the given names.
    """

    def make(*absent: str) -> str:
        home = tmp_path_factory.mktemp("environment")
        subprocess.run(
            [sys.executable, "-m", "venv", "--without-pip", str(home)], check=True, timeout=60
        )
        paths = {"base": str(home), "platbase": str(home)}
        for name in ("purelib", "platlib"):
            target = Path(sysconfig.get_path(name, "venv", vars=paths))
            for entry in Path(sysconfig.get_path(name)).iterdir():
                link = target / entry.name
                if not entry.name.lower().startswith(absent) and not link.exists():
                    link.symlink_to(entry)
        return str(home / "bin" / "python")

    return make


@pytest.fixture
def commands(tmp_path) -> Callable[..., Path]:
    """Returns a function that makes a directory for PATH with the given commands in it.

    Each keyword is a command: None links the real one, a string is the body of a shell script.
    """

    def make(**bodies: str | None) -> Path:
        directory = tmp_path / "commands"
        directory.mkdir(exist_ok=True)
        for name, body in bodies.items():
            command = directory / name
            if body is None:
                real = next(p for p in os.get_exec_path() if (Path(p) / name).exists())
                command.symlink_to(Path(real) / name)
            else:
                command.write_text(f"#!/bin/sh\n{body}\n")
                command.chmod(0o755)
        return directory

    return make
