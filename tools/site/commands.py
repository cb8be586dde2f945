"""Pages of the command line: what `--help` of each command says, asked at build."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import click
import typer

from tfdml.cli.main import app
from tools.site.contents import toctree
from tools.site.staging import code, write

WIDTH = 92


def write_pages() -> None:
    """Writes a page for each command of `tfdml`, and one that lists them."""
    words = list(_commands(typer.main.get_command(app), ()))
    with ThreadPoolExecutor(2) as pool:
        texts = dict(zip(words, pool.map(help_of, words), strict=True))
    names = sorted({word[0] for word in words if word})
    for name in names:
        parts = [f"# tfdml {name}\n"]
        for command in (word for word in words if word[:1] == (name,)):
            heading = [f"## tfdml {' '.join(command)}\n"] if len(command) > 1 else []
            parts += [*heading, code(texts[command])]
        write(f"commands/{name}.md", "\n".join(parts))
    index = ["# Command line\n", code(texts[()]), toctree(names, hidden=False)]
    write("commands/index.md", "\n".join(index))


def _commands(command: click.Command, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yields the words of a command and of those in its group."""
    yield words
    for name, inner in getattr(command, "commands", {}).items():
        if not inner.hidden:
            yield from _commands(inner, (*words, name))


def help_of(words: tuple[str, ...]) -> str:
    """Returns what a command's `--help` prints."""
    settings = {"COLUMNS": str(WIDTH), "TERMINAL_WIDTH": str(WIDTH), "NO_COLOR": "1"}
    program = "import sys; sys.argv[0] = 'tfdml'; from tfdml.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, *words, "--help"],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line).rstrip() for line in done.stdout.splitlines()]
    return "\n".join(lines).strip("\n")
