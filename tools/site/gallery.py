"""Runs the recipes, and writes a page of each: what it is for, its output, its curves and source.

An output is kept by a digest of the recipe, tfdml's sources and the installed versions, so the next
build runs only what has changed.
"""

import ast
import hashlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

from tools.site import curves
from tools.site.contents import toctree
from tools.site.paths import GALLERY_CACHE, ROOT, SOURCE
from tools.site.recipes import HELPERS, RECIPES, Recipe
from tools.site.staging import code, write

COMMON_NOTE = "All ranks share one machine's processors. Warnings are left out."
# For all commands of a recipe together: it takes half a minute, and much longer under load.
LIMIT_SECONDS = 480
_COLOURS = re.compile(r"\x1b\[[\d;]*[A-Za-z]")
# TensorFlow's log lines and warnings, also behind the prefix of a launcher.
_NOISE = re.compile(
    r"^(\[\d+\](<stderr>:)?\s?)?([IWE]\d{4} \d\d:|\d{4}-\d\d-\d\d \d\d:\d\d.*: [IWE] |WARNING:)"
)


class RecipeFailed(RuntimeError):
    """Raised when a recipe's command fails; the message has its output."""


def write_pages(run_recipes: bool = True) -> None:
    """Runs what has changed, and writes the gallery's pages.

    Args:
        run_recipes: Whether to run recipes; else pages show an output only where one is kept.

    Raises:
        RecipeFailed: If a command of a recipe fails.
    """
    for recipe in RECIPES:
        cache_folder = GALLERY_CACHE / digest(recipe)
        if run_recipes and not (cache_folder / "output.txt").exists():
            began = time.monotonic()
            _keep(recipe, cache_folder)
            print(f"site: {recipe.name} ran in {time.monotonic() - began:.0f} s", flush=True)
        write(f"gallery/{recipe.name}.md", _page(recipe, cache_folder))
    for name, title in HELPERS.items():
        source = (ROOT / "recipes" / f"{name}.py").read_text(encoding="utf-8")
        write(f"gallery/{name}.md", f"# {title}\n\n`recipes/{name}.py`\n\n{code(source, 'python')}")
    write("gallery/index.md", _index())


def digest(recipe: Recipe) -> str:
    """Returns a digest of all that a recipe's output depends on."""
    package = ROOT / "tfdml"
    files = {f for pattern in ("*.py", "*.cc", "*.h") for f in package.rglob(pattern)}
    sources = sorted(files | _own(recipe.name))
    names = ("keras", "tensorflow", "tensorflow-cpu", "numpy")
    versions = [f"{name} {metadata.version(name)}" for name in names if _has(name)]
    parts = [recipe.name, *recipe.commands, sys.version, *versions]
    parts += [
        hashlib.sha256(f.read_bytes()).hexdigest() + str(f.relative_to(ROOT)) for f in sources
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:20]


def _has(distribution: str) -> bool:
    return any(True for _ in metadata.distributions(name=distribution))


def _own(name: str) -> set[Path]:
    """Returns a recipe's file, and the other recipes that it imports."""
    file = ROOT / "recipes" / f"{name}.py"
    found = {file}
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) else []
        for other in names:
            if other != name and (ROOT / "recipes" / f"{other}.py").exists():
                found |= _own(other)
    return found


def _keep(recipe: Recipe, cache_folder: Path) -> None:
    """Runs a recipe and keeps its output."""
    output = run(recipe)
    cache_folder.mkdir(parents=True, exist_ok=True)
    (cache_folder / "output.txt").write_text(output, encoding="utf-8")


def run(recipe: Recipe) -> str:
    """Runs a recipe's commands in an empty folder; returns them with what they print.

    Raises:
        RecipeFailed: If a command fails, or all take longer than `LIMIT_SECONDS`.
    """
    python = recipe.python() if recipe.python else Path(sys.executable)
    deadline = time.monotonic() + LIMIT_SECONDS
    shown = []
    with tempfile.TemporaryDirectory(prefix="tfdml-gallery-") as folder:
        (Path(folder) / "recipes").symlink_to(ROOT / "recipes")
        for command in recipe.commands:
            output = _said(recipe, python, command, folder, deadline - time.monotonic())
            shown.append(f"$ {command}\n{output}".rstrip())
    return "\n\n".join(shown) + "\n"


def _said(recipe: Recipe, python: Path, command: str, folder: str, seconds: float) -> str:
    environment = {
        **os.environ,
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_NUM_INTRAOP_THREADS": "1",
        "COLUMNS": "100",
        "NO_COLOR": "1",
        "PYTHONWARNINGS": "ignore",
    }
    with subprocess.Popen(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=max(seconds, 1))
        except subprocess.TimeoutExpired as error:
            os.killpg(process.pid, signal.SIGKILL)
            message = f"{recipe.name}: took longer than {LIMIT_SECONDS} s: {command}"
            raise RecipeFailed(message) from error
    if process.returncode:
        raise RecipeFailed(f"{recipe.name}: exit code {process.returncode}: {command}\n{output}")
    lines = [_COLOURS.sub("", line.rsplit("\r", 1)[-1]).rstrip() for line in output.splitlines()]
    return "\n".join(line for line in lines if line and not _NOISE.match(line))


def _page(recipe: Recipe, cache_folder: Path) -> str:
    (SOURCE / "gallery").mkdir(parents=True, exist_ok=True)
    source = (ROOT / "recipes" / f"{recipe.name}.py").read_text(encoding="utf-8")
    purpose = (ast.get_docstring(ast.parse(source)) or "").split("\n\n")[0].replace("\n", " ")
    parts = [f"# {recipe.title}", "", purpose, "", f"The file is `recipes/{recipe.name}.py`."]
    if (cache_folder / "output.txt").exists():
        note = f"{recipe.note} {COMMON_NOTE}".strip()
        output = (cache_folder / "output.txt").read_text(encoding="utf-8")
        parts += ["", "## Output", "", note, "", code(output)]
        if curves.draw(output, SOURCE / "gallery" / f"{recipe.name}.svg"):
            parts += [f"![Loss and metrics of each epoch]({recipe.name}.svg)", ""]
    else:
        parts += ["", "This recipe was not run when the site was built.", ""]
    return "\n".join([*parts, "## Source", "", code(source, "python")])


def _index() -> str:
    text = (
        "# Gallery\n\n"
        "Recipes are complete files: each begins with its command lines. The pages show what they "
        "printed when this site was built, on two ranks of one machine, and on small data that "
        "need no download.\n\n"
    )
    rows = "\n".join(f"- [{r.title}]({r.name}.md): `recipes/{r.name}.py`" for r in RECIPES)
    names = [*(r.name for r in RECIPES), *HELPERS]
    return f"{text}{rows}\n\n{toctree(names)}"
