"""ByzFL's rules, imported without its plots and models, which need more packages."""

import importlib.machinery
import importlib.util
import sys
from types import ModuleType


def import_rules() -> ModuleType:
    """Returns ByzFL's module of rules."""
    found = importlib.util.find_spec("byzfl")
    package = importlib.util.module_from_spec(importlib.machinery.ModuleSpec("byzfl", None))
    package.__path__ = found.submodule_search_locations
    sys.modules["byzfl"] = package
    return importlib.import_module("byzfl.aggregators.aggregators")
