"""Cases run by ranks: recipes, called as by their command lines."""

import contextlib
import importlib
import io
import sys
from pathlib import Path
from types import ModuleType

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


def recipe(name: str) -> ModuleType:
    """Returns a recipe's module."""
    if str(RECIPES) not in sys.path:
        sys.path.insert(0, str(RECIPES))
    return importlib.import_module(name)


def run(name: str, options: dict[str, object], function: str = "main") -> str:
    """Returns the output of a function of a recipe's command line."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        getattr(recipe(name), function)(**options)
    return printed.getvalue()
