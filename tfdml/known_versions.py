"""Check of the installed Keras and TensorFlow against the releases that tfdml knows.

For each function that a seam replaces or a strategy overrides, `known_sources.json` has a digest of
its source in each known release. `python -m tools.seam_digests` writes it.

| installed | what happens |
|---|---|
| a release that was looked at | nothing |
| another patch release of a known minor version | a warning if a function has changed |
| a newer minor version | a warning; refused if a function has changed |
| an older minor version, another major one | refused |
"""

import ast
import hashlib
import importlib
import inspect
import io
import json
import textwrap
import tokenize
import warnings
from importlib import resources
from typing import Any

from packaging.version import Version

# By library, function (`module:Class.function`) and digest: the releases with this source.
Sources = dict[str, dict[str, dict[str, str]]]

GONE = "gone"
_NAMES = {"keras": "Keras", "tensorflow": "TensorFlow"}


def known_sources() -> Sources:
    """Returns the digests of all known releases."""
    file = resources.files("tfdml").joinpath("known_sources.json")
    return json.loads(file.read_text(encoding="utf-8"))


def known_releases(library: str) -> list[Version]:
    """Returns the known releases of a library, the oldest first."""
    functions = known_sources()[library].values()
    releases = {r for digests in functions for rs in digests.values() for r in rs.split()}
    return sorted(map(Version, releases))


def check_installed() -> None:
    """Checks the installed Keras and TensorFlow.

    Raises:
        ImportError: If tfdml cannot run on one of them.
    """
    for library in _NAMES:
        check(library, importlib.import_module(library).__version__)


def check(library: str, version: str) -> None:
    """Warns of a version that is not known, or rejects it: see the table above.

    Args:
        library: `keras` or `tensorflow`, which must be imported.
        version: The library's version.

    Raises:
        ImportError: If tfdml cannot run on it.
    """
    installed, known = Version(version), known_releases(library)
    if Version(installed.public) in known:
        return
    name, (first, last) = _NAMES[library], (known[0], known[-1])
    supported = f"{_minor(first)} to {_minor(last)}"
    fix = f"Run `pip install '{library}=={_minor(last)}.*'`."
    if installed.major != last.major or installed.release[:2] < first.release[:2]:
        raise ImportError(
            f"{name} must be {supported} for this version of tfdml, which relies on its internals. "
            f"Received: {name} {version}. {fix}"
        )
    same_minor = [r for r in known if r.release[:2] == installed.release[:2]]
    nearest = (same_minor or known)[-1]
    changed = changed_since(library, nearest)
    if changed and not same_minor:
        raise ImportError(
            f"{name} {version} must have the functions that tfdml replaces as {name} {nearest} has "
            f"them, because tfdml was not tested with it. Received: changed are "
            f"{', '.join(changed)}. {fix}"
        )
    if changed or not same_minor:
        what = (
            f"it differs in {', '.join(changed)}"
            if changed
            else "the functions that it replaces are the same"
        )
        warnings.warn(
            f"tfdml was not tested with {name} {version}, but with {name} {nearest}: {what}. "
            f"If results are not as expected: {fix}",
            stacklevel=2,
        )


def changed_since(library: str, release: Version) -> list[str]:
    """Returns the functions of the installed library whose source differs from a release's."""
    return [
        function.replace(":", ".")
        for function, digests in known_sources()[library].items()
        if str(release) not in digests.get(digest(function), "").split()
    ]


def digest(function: str) -> str:
    """Returns a digest of a function's source without comments and docstrings.

    Args:
        function: The function, as `module:Class.function`.

    Returns:
        16 hexadecimal digits, the same on all versions of Python; `GONE` if the function does not
        exist.
    """
    module, _, path = function.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in path.split("."):
            found = inspect.getattr_static(found, name)
        # tfdml's replacements and TensorFlow's dispatchers wrap the original function.
        source = inspect.getsource(inspect.unwrap(getattr(found, "fget", found)))
    except (ImportError, AttributeError, OSError, TypeError):
        return GONE
    return hashlib.sha256(_code(source).encode()).hexdigest()[:16]


def _code(source: str) -> str:
    """Returns the source of a function without its comments and docstrings."""
    source = textwrap.dedent(source)
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            text = node.body[0]
            lines[text.lineno - 1 : text.end_lineno] = [""] * (text.end_lineno - text.lineno + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _minor(version: Version) -> str:
    return f"{version.major}.{version.minor}"
