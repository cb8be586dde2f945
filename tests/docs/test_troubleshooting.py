"""The messages that head the entries of the troubleshooting pages are those that programs print."""

import ast
import functools
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, name

PAGES = sorted((ROOT / "docs" / "troubleshooting").glob("*.md"))
# A heading that is a message, and the file that has it.
_ENTRY = re.compile(r"^## (?:`` ?(.+?) ?``|`([^`]+)`)\n\n<!-- from: (\S+) -->\n", re.MULTILINE)
SITE_PACKAGES = Path(find_spec("tensorflow").origin).parents[1]


def entries() -> list[tuple[str, str, str]]:
    """Returns the page, the message and the origin of each entry that has one."""
    return [
        (name(page), m[1] or m[2], m[3])
        for page in PAGES
        for m in _ENTRY.finditer(page.read_text(encoding="utf-8"))
    ]


@pytest.mark.parametrize(("page", "message", "origin"), entries(), ids=lambda value: value[:40])
def test_a_message_is_in_the_source(page, message, origin):
    assert not missing(message, origin), f"{page}: {origin} has no {missing(message, origin)!r}"


def test_there_are_messages_of_all():
    origins = [origin for _, _, origin in entries()]
    assert len(origins) > 35
    for package in ("tfdml", "horovod", "keras", "tensorflow"):
        assert any(origin.startswith(package) for origin in origins)


def test_every_origin_heads_an_entry():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert text.count("<!-- from:") == len(_ENTRY.findall(text)), name(page)


def test_a_message_that_nobody_prints_is_seen():
    assert missing("Weights must be the same bytes", "tfdml") == "Weights must be the same bytes"
    assert missing("Collective ops is ended", "tensorflow/libtensorflow_framework.so.2")


def missing(message: str, origin: str) -> str | None:
    """Returns the part of a message that its origin does not have; None if it has all."""
    for part in message.split("…"):
        part = " ".join(part.split()).strip()
        if part and part.encode() not in content_of(origin):
            return part
    return None


@functools.cache
def content_of(origin: str) -> bytes:
    """Returns what is searched for a message: of Python files their strings, of libraries all."""
    if origin == "tfdml":
        files = sorted((ROOT / "tfdml").rglob("*.py"))
        return "\n".join(_strings(file) for file in files).encode()
    if origin == "horovod":
        files = sorted((SITE_PACKAGES / "horovod" / "tensorflow").glob("*.so"))
        return b"\n".join(file.read_bytes() for file in files)
    file = ROOT / origin if origin.startswith("tests/") else SITE_PACKAGES / origin
    return _strings(file).encode() if file.suffix == ".py" else file.read_bytes()


def _strings(file: Path) -> str:
    """Returns a Python file's strings; a line for each, with values left out as `{}`."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            parts = [p.value if isinstance(p, ast.Constant) else "{}" for p in node.values]
            found.append("".join(parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return "\n".join(" ".join(text.split()) for text in found)
