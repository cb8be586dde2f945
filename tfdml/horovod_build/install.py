"""Installs a built wheel into this Python environment and tests that it loads."""

import json
import sys
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tfdml import topology
from tfdml.horovod_build import child
from tfdml.horovod_build.cache import sha256
from tfdml.horovod_build.errors import BuildError
from tfdml.horovod_build.loaded import Loaded, load
from tfdml.horovod_build.source_archive import last_lines

_INSTALL_SECONDS = 300


def installed_from(wheel: Path) -> bool:
    """Returns whether the installed Horovod came from exactly this wheel.

    Args:
        wheel: Path of a wheel in the cache.
    """
    try:
        text = metadata.distribution("horovod").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return False
    if not text:
        return False
    origin = json.loads(text)
    if Path(unquote(urlsplit(origin.get("url", "")).path)) != wheel:
        return False
    hashes = origin.get("archive_info", {}).get("hashes", {})
    return hashes.get("sha256") == sha256(wheel)


def install(wheel: Path) -> Loaded | None:
    """Installs a wheel unless it is already installed, and loads Horovod once.

    Args:
        wheel: Path of the wheel to install.

    Returns:
        Properties of the installed Horovod; None if it was already installed.

    Raises:
        BuildError: If pip cannot install the wheel, or Horovod cannot be loaded.
    """
    if installed_from(wheel):
        return None
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--force-reinstall"]
    ended = child.run(
        [*command, "--no-index", str(wheel)],
        environment=topology.child_environment(),
        timeout=_INSTALL_SECONDS,
    )
    if not ended.ok:
        raise BuildError(
            f"pip must be able to install {wheel}.",
            received=last_lines(ended.output, 5),
            fix="Check that this Python environment is writable, or install the wheel by hand.",
        )
    loaded = load()
    if isinstance(loaded, str):
        raise BuildError(
            "The installed Horovod must load with the installed TensorFlow.",
            received=loaded,
            fix="Run `tfdml build-horovod --rebuild`; if that does not help, `tfdml doctor`.",
        )
    return loaded
