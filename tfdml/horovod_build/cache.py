"""Cache of built wheels.

A wheel's directory is named after a key of everything that changes the wheel: TensorFlow, Python,
Horovod and what is changed in it, the flags, the C library and the machine. A complete directory is
renamed into place, so a cached wheel is always whole, even if a build is killed.
"""

import dataclasses
import hashlib
import json
import platform
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path

import platformdirs

from tfdml.horovod_build.changes import fingerprint
from tfdml.horovod_build.options import BuildOptions
from tfdml.horovod_build.requirements import TensorFlow

_DESCRIPTION = "build.json"


def cache_directory() -> Path:
    """Returns this user's cache directory for tfdml on this machine."""
    return Path(platformdirs.user_cache_dir("tfdml"))


def wheel_facts(
    horovod: str, tensorflow: TensorFlow, options: BuildOptions, environment: Mapping[str, str]
) -> dict[str, object]:
    """Lists everything that changes the wheel.

    Args:
        horovod: Version of Horovod.
        tensorflow: TensorFlow that it is built against.
        options: Transports that it is built with.
        environment: Environment variables of the command.

    Returns:
        JSON-compatible facts; equal facts mean an interchangeable wheel.
    """
    return {
        "changes": fingerprint(),
        "horovod": horovod,
        "tensorflow": f"{tensorflow.distribution} {tensorflow.version}",
        "python": sys.implementation.cache_tag,
        "platform": sysconfig.get_platform(),
        "libc": " ".join(platform.libc_ver()),
        "flags": options.fingerprint(environment),
    }


@dataclasses.dataclass(frozen=True)
class WheelCache:
    """Directory of built wheels.

    Attributes:
        root: Path of the directory, which need not exist yet.
    """

    root: Path

    def entry(self, facts: Mapping[str, object]) -> Path:
        """Returns the directory of the wheel with these facts, built or not."""
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
        tensorflow = str(facts["tensorflow"]).split()[-1]
        return self.root / (f"horovod-{facts['horovod']}-tf{tensorflow}-{facts['python']}-{digest}")

    def find(self, facts: Mapping[str, object]) -> Path | None:
        """Finds a built wheel.

        Args:
            facts: Facts that the wheel must be built from; see `wheel_facts`.

        Returns:
            Path of the wheel; None if it is missing or its bytes have changed since the build.
        """
        entry = self.entry(facts)
        try:
            description = json.loads((entry / _DESCRIPTION).read_text(encoding="utf-8"))
            wheel = entry / description["wheel"]
            intact = sha256(wheel) == description["sha256"]
        except (OSError, ValueError, KeyError):
            return None
        return wheel if intact else None

    def add(self, wheel: Path, facts: Mapping[str, object]) -> Path:
        """Copies a wheel into the cache by a rename, replacing any older one.

        Args:
            wheel: Wheel to copy.
            facts: Facts that it was built from.

        Returns:
            Path of the wheel in the cache.
        """
        entry = self.entry(facts)
        self.root.mkdir(parents=True, exist_ok=True)
        staged = Path(tempfile.mkdtemp(prefix=".incomplete-", dir=self.root))
        try:
            staged.chmod(0o755)
            shutil.copy2(wheel, staged / wheel.name)
            description = {"wheel": wheel.name, "sha256": sha256(wheel), "built_from": facts}
            (staged / _DESCRIPTION).write_text(json.dumps(description, indent=2), encoding="utf-8")
            if entry.exists():
                shutil.rmtree(entry)
            staged.rename(entry)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
        return entry / wheel.name


def sha256(path: Path) -> str:
    """Returns the SHA-256 digest of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as source:
        while chunk := source.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
