"""The architecture page names files, functions and packages that exist."""

import ast
import re

import pytest

from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "tfdml"
HOPS = sorted(set(re.findall(r"`([\w/]+\.py):([\w.]+)`", PAGE)))
# Files and folders of the repository, or of the package; names such as `bucket_bytes` are neither.
PATHS = sorted(set(re.findall(r"`((?:[\w.]+/)+(?:\w+\.\w+)?)`", PAGE)))


def test_there_are_walks():
    assert len(HOPS) > 50
    assert len(PATHS) > 20


@pytest.mark.parametrize(("file", "function"), HOPS)
def test_a_hop_exists(file, function):
    scope = ast.parse((PACKAGE / file).read_text(encoding="utf-8"))
    for part in function.split("."):
        found = [n for n in ast.walk(scope) if getattr(n, "name", None) == part]
        assert found, f"{file} defines no {part}"
        scope = found[0]


@pytest.mark.parametrize("path", PATHS)
def test_a_path_exists(path):
    assert (PACKAGE / path).exists() or (ROOT / path).exists()


def test_every_package_is_named():
    folders = {p.parent.relative_to(PACKAGE) for p in PACKAGE.rglob("__init__.py")}
    named = {f"{folder}/" for folder in folders if str(folder) != "."}
    missing = {n for n in named if f"`{n}" not in PAGE}
    assert missing == {"cli/selftest/"}  # Part of one command.
