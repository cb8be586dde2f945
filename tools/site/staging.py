"""Copies the repository's pages into Sphinx's source folder, with their links adapted.

The pages are plain Markdown whose links lead to files of the repository, so they can be read there
too. On the site a link leads to the page made of that file: a page of `docs/`, a recipe in the
gallery, or the file's source.
"""

import os
import re
import shutil
from pathlib import Path

from tools.site.contents import ELSEWHERE, sidebar, toctree
from tools.site.paths import ROOT, SOURCE

# The notes are the beginning of another page, too.
_IN_ANOTHER = ("index.md", "compression_notes.md")
_FENCE = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_LANGUAGES = {".py": "python", ".json": "json", ".sh": "bash"}


def stage() -> None:
    """Writes all pages of the repository into the source folder."""
    for page, name in pages().items():
        orphan = "---\norphan: true\n---\n\n" if page.name == "compression_notes.md" else ""
        text = page.read_text(encoding="utf-8")
        write(name, orphan + _with_links(text, page.parent, name))
    _append("index.md", sidebar())
    for index, folder in (("benchmarks.md", "benchmarks"), ("troubleshooting/index.md", ".")):
        inside = (SOURCE / index).parent / folder
        names = sorted(p.stem for p in inside.glob("*.md") if p.name not in _IN_ANOTHER)
        _append(index, toctree([f"{folder}/{name}" for name in names]))


def pages() -> dict[Path, str]:
    """Returns the repository's pages, and their names in the source folder."""
    found = {p: str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md")}
    found |= {p: f"benchmarks/{p.name}" for p in (ROOT / "tools/benchmarks").glob("*.md")}
    for path, name in ELSEWHERE.items():
        if path.endswith(".md"):
            found[ROOT / path] = name
    return found


def _append(name: str, text: str) -> None:
    with (SOURCE / name).open("a", encoding="utf-8") as page:
        page.write("\n" + text)


def write(name: str, text: str) -> None:
    """Writes a page into the source folder."""
    target = SOURCE / name
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")


def _with_links(text: str, folder: Path, name: str) -> str:
    parts = _FENCE.split(text)
    for number in range(0, len(parts), 2):  # What is between fenced blocks.
        parts[number] = _LINK.sub(lambda m: f"]({_site_link(m[1], folder, name)})", parts[number])
    return "".join(parts)


def _site_link(link: str, folder: Path, name: str) -> str:
    """Returns where a link of a page leads on the site.

    Args:
        link: The link in the repository.
        folder: The folder of the page in the repository.
        name: The name of the page in the source folder.
    """
    path, hash_sign, anchor = link.partition("#")
    if "://" in link or not path:
        return link
    target = (folder / path).resolve()
    staged = _staged(target)
    return os.path.relpath(staged, Path(name).parent) + hash_sign + anchor


def _staged(target: Path) -> str:
    """Returns the name of a repository's file in the source folder, where it is or is put now."""
    path = str(target.relative_to(ROOT))
    if path in ELSEWHERE:
        return ELSEWHERE[path]
    if target in (known := pages()):
        return known[target]
    if target.parent == ROOT / "recipes":
        return f"gallery/{target.stem}.md"
    if target.suffix in (".png", ".svg"):
        name = f"pictures/{target.name}"
        (SOURCE / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(target, SOURCE / name)
        return name
    name = f"source/{path}.md"
    if not (SOURCE / name).exists():
        write(name, _source_page(target, path))
    return name


def _source_page(target: Path, path: str) -> str:
    """Returns a page with a file's source, or with those of a folder's Python files."""
    files = sorted(target.glob("*.py")) if target.is_dir() else [target]
    blocks = []
    for file in files:
        text = file.read_text(encoding="utf-8")
        heading = f"## {file.name}\n\n" if target.is_dir() and text else ""
        blocks += [f"{heading}{code(text, _LANGUAGES.get(file.suffix, 'text'))}"] if text else []
    return "\n".join(["---\norphan: true\n---", f"# {path}", "", *blocks])


def code(text: str, language: str = "text") -> str:
    """Returns a fenced block."""
    return f"`````{language}\n{text.strip(chr(10))}\n`````\n"
