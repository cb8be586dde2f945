"""Pages of the API: a page for each public module, made from docstrings by Sphinx's autodoc.

Objects are documented by their public names, so pages stay right when code moves.
"""

import importlib
import inspect

import tfdml
from tools.site.contents import toctree
from tools.site.staging import write

# Base classes that have an entry of their own.
_PUBLIC = {"Compressor"}
_OF_KERAS = {"set_model", "set_params"}
# `tfdml.strategies` holds the same classes as `tfdml` itself.
MODULES = sorted(
    name
    for name in tfdml.__all__
    if inspect.ismodule(getattr(tfdml, name)) and name != "strategies"
)


def write_pages() -> None:
    """Writes the pages of all public modules."""
    modules = {"strategies", *MODULES}
    own = [n for n in tfdml.__all__ if n not in modules and n != "__version__"]
    write("api/tfdml.rst", _page("tfdml", own))
    for module in MODULES:
        name = f"tfdml.{module}"
        write(f"api/{name}.rst", _page(name, importlib.import_module(name).__all__))
    index = "# API\n\nAll public names, a page for each module.\n\n"
    pages = ["tfdml", *(f"tfdml.{module}" for module in MODULES)]
    write("api/index.md", index + toctree(pages, hidden=False))


def _page(module: str, names: list[str]) -> str:
    lines = [module, "=" * len(module), "", f".. automodule:: {module}", "   :no-members:", ""]
    for name in names:
        lines += ["", name, "-" * len(name), "", *_directive(module, name)]
    return "\n".join(lines) + "\n"


def _directive(module: str, name: str) -> list[str]:
    value = getattr(importlib.import_module(module), name)
    if inspect.isclass(value):
        members = [f"   :members: {', '.join(_members(value))}"] if _members(value) else []
        return [f".. autoclass:: {module}.{name}", *members, ""]
    if callable(value):
        return [f".. autofunction:: {module}.{name}", ""]
    return [f".. autodata:: {module}.{name}", ""]


def _members(value: type) -> list[str]:
    """Returns a class's public members that tfdml defines, those of its own bases included.

    Left out are what codecs do for `Compressor`, which has a page of its own, and what Keras calls
    in callbacks: users call neither.
    """
    if any(base.__name__ in _PUBLIC for base in value.__mro__[1:]):
        return []
    own = [base for base in value.__mro__ if base.__module__.partition(".")[0] == "tfdml"]
    names = {
        name: member
        for base in reversed(own)
        for name, member in vars(base).items()
        if not name.startswith(("_", "on_")) and name not in _OF_KERAS
    }
    return [name for name, member in names.items() if getattr(member, "__doc__", None)]
