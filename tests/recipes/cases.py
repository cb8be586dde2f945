"""Cases run by ranks: recipes, called as by their command lines."""

import contextlib
import importlib
import io
import sys
from pathlib import Path

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


def run(recipe: str, options: dict[str, object], function: str = "main") -> str:
    """Returns the output of a function of a recipe's command line."""
    if str(RECIPES) not in sys.path:
        sys.path.insert(0, str(RECIPES))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        getattr(importlib.import_module(recipe), function)(**options)
    return printed.getvalue()
