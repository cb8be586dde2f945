"""Sphinx's configuration of the site. Everything that a page shows is in the built folder."""

from pathlib import Path

import tfdml
from tools.site.docstrings import to_rst

project = "tfdml"
author = "The tfdml developers"
copyright = author
version = release = tfdml.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
# Links to headings, as GitHub makes them.
myst_heading_anchors = 4
myst_enable_extensions = ["attrs_block"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

nitpicky = True
nitpick_ignore_regex = [
    # Types of other libraries: their inventories would be read from the network.
    (r"py:\w+", r"(tensorflow|tf|keras|numpy|np|collections|pathlib|datetime|typing)(\..*)?"),
    # Built-in types, for the same reason.
    (
        r"py:\w+",
        r"os\.PathLike|(int|str|float|bool|bytes|dict|list|tuple|set|type|object|None|Any|Path)",
    ),
    (r"py:exc", r"\w*(Error|Interrupt)"),
    # Types that signatures name and users never write: they are not public.
    (r"py:class", r"tfdml\.\w+\..*"),
    (r"py:class", r"[A-Z]\w*"),
]

pygments_dark_style = "monokai"
# Headings name the objects.
toc_object_entries = False

# Blocks without a language are commands and what programs print.
highlight_language = "text"

html_theme = "furo"
html_title = "tfdml"
html_static_path = [str(Path(__file__).with_name("static"))]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {
    "navigation_with_keys": True,
    "light_css_variables": {"color-brand-primary": "#b35a00", "color-brand-content": "#9a4d00"},
    "dark_css_variables": {"color-brand-primary": "#ffb066", "color-brand-content": "#ffb066"},
}
copybutton_prompt_text = "$ "


def setup(app) -> None:
    """Has docstrings converted before napoleon reads their sections."""

    def convert(app, what, name, value, options, lines: list[str]) -> None:
        lines[:] = to_rst(lines)

    app.connect("autodoc-process-docstring", convert, priority=100)
