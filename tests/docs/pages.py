"""Parser for README and the pages: blocks, links, headings and commands."""

import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
INDEX = ROOT / "docs" / "index.md"
# Pages that must be reachable from `INDEX`, and README.
LINKED = sorted(
    page
    for folder in ("docs", "recipes", "tools/benchmarks")
    for page in (ROOT / folder).rglob("*.md")
)
PAGES = [README, *LINKED]

_FENCED = re.compile(
    r"(?:^ *<!-- not run: ([^\n]+) -->\n\n?)?^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL
)


class Block(NamedTuple):
    """A fenced block of a page.

    Attributes:
        language: Word after the opening fence, "" if none.
        text: Lines of the block, without the page's indentation.
        not_run: The reason why no test runs it, in a comment above it; "" if a test does.
    """

    language: str
    text: str
    not_run: str = ""


def name(page: Path) -> str:
    """Returns a page's path in the repository."""
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[Block]:
    """Returns a page's fenced blocks."""
    text = page.read_text(encoding="utf-8")
    return [Block(m[3], textwrap.dedent(m[4]), m[1] or "") for m in _FENCED.finditer(text)]


def prose(page: Path) -> str:
    """Returns a page's text without its fenced blocks."""
    return _FENCED.sub("", page.read_text(encoding="utf-8"))


def links(page: Path) -> list[str]:
    """Returns the targets of a page's links and pictures."""
    without_code = re.sub(r"`[^`]*`", "code", prose(page))
    return re.findall(r"\]\(([^)\s]+)\)", without_code)


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.strip().lower()).replace(" ", "-") for h in headings}


def command_lines(block: Block) -> list[str]:
    """Returns a shell block's command lines, without comments; none for another block."""
    if block.language not in ("", "bash", "sh"):
        return []
    lines = [re.sub(r"\s+#.*$", "", line).strip() for line in block.text.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def tfdml_commands(page: Path) -> Iterator[list[str]]:
    """Yields the words of each `tfdml …` command of a page: in its blocks, and within its lines."""
    for block in blocks(page):
        for line in command_lines(block):
            # Lines that a failing job prints, and paths of an environment, are not commands.
            if line.startswith("tfdml "):
                yield shlex.split(line)[1:]
    for quoted in re.findall(r"`(tfdml [^`]+)`", prose(page)):
        words = shlex.split(quoted)[1:]
        if words[0] not in ("…", "..."):
            yield words
