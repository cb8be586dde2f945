"""Finds what a built page would load from the network."""

import re
from html.parser import HTMLParser
from pathlib import Path

# Attributes by which an element loads something when the page is opened.
_LOADS = {
    "audio": ("src",),
    "iframe": ("src",),
    "img": ("src", "srcset"),
    "image": ("href", "xlink:href"),
    "link": ("href",),
    "script": ("src",),
    "source": ("src", "srcset"),
    "video": ("src", "poster"),
}
_REMOTE = re.compile(r"^\s*(?:https?:)?//", re.IGNORECASE)
_CSS = re.compile(r"""(?:url\(\s*["']?|@import\s+["'])((?:https?:)?//[^"')\s]+)""", re.IGNORECASE)


def remote_resources(folder: Path) -> list[str]:
    """Returns `file: address` of everything in a built site that is loaded from the network.

    Args:
        folder: The folder of HTML and CSS files. Links that a reader follows may be remote.
    """
    found = []
    for file in sorted(folder.rglob("*")):
        if file.suffix in (".html", ".svg"):
            parser = _Resources()
            parser.feed(file.read_text(encoding="utf-8"))
            found += [f"{file.relative_to(folder)}: {address}" for address in parser.remote]
        elif file.suffix == ".css":
            addresses = _CSS.findall(file.read_text(encoding="utf-8"))
            found += [f"{file.relative_to(folder)}: {address}" for address in addresses]
    return found


class _Resources(HTMLParser):
    """Collects the remote addresses that a page's elements load."""

    def __init__(self):
        super().__init__()
        self.remote: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keeps the remote addresses of an element, and of its style."""
        values = dict(attrs)
        loaded = [values.get(name) or "" for name in _LOADS.get(tag, ())]
        # These name the page's address, and load nothing.
        if tag == "link" and values.get("rel") in ("canonical", "license", "author"):
            loaded = []
        self.remote += [value for value in loaded if _REMOTE.match(value)]
        self.remote += _CSS.findall(values.get("style") or "")

    def handle_data(self, data: str) -> None:
        """Keeps the remote addresses of a style sheet within the page."""
        self.remote += _CSS.findall(data) if "@import" in data or "url(" in data else []
