"""Optional packages that only some inputs need: imported on use, with one error message."""

import importlib
from types import ModuleType
from typing import NamedTuple


class _Package(NamedTuple):
    name: str
    extra: str


# By the name of the top-level module.
_PACKAGES = {
    "h5py": _Package("h5py", "records"),
    "PIL": _Package("pillow", "records"),
    "pyarrow": _Package("pyarrow", "records"),
    "datasets": _Package("datasets", "hubs"),
    "tensorflow_datasets": _Package("tensorflow-datasets", "hubs"),
}


class MissingPackageError(ImportError, ValueError):
    """A package of one of tfdml's extras cannot be imported.

    It is also a ValueError: the input that needs the package is the argument at fault.
    """


def load(module: str, needed_by: str) -> ModuleType:
    """Imports a module of an optional package.

    Args:
        module: Name of the module. Its package is one of tfdml's extras.
        needed_by: Activity that needs the module; the error message begins with it.

    Returns:
        The module.

    Raises:
        MissingPackageError: If the package is not installed, or cannot be imported.
    """
    package = _PACKAGES[module.split(".")[0]]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackageError(
            f"{needed_by} needs the package {package.name}. Received: {error}. Install it: "
            f"pip install 'tfdml[{package.extra}]'."
        ) from error


def find(module: str) -> ModuleType | None:
    """Returns a module of an optional package; None if it is not installed.

    Args:
        module: Name of the module.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        return None
