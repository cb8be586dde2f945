"""Folders of the site: its sources, and what is built."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "docs"
# Sphinx's source folder: pages with their links adapted, and generated pages.
SOURCE = BUILD / "source"
HTML = BUILD / "html"
# Outputs of recipes by the digest of what they depend on; kept between builds.
GALLERY_CACHE = BUILD / "gallery"
