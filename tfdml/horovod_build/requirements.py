"""Checks of a build's requirements, made before anything is downloaded or compiled.

A check that fails raises `BuildError` with the fix; most return what they found.
"""

import dataclasses
import importlib.util
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from packaging.version import Version

from tfdml.horovod_build.errors import BuildError

# Horovod's CMake files require 3.13; CMake 4 rejects the old policy version of its bundled gloo.
CMAKE_MINIMUM = Version("3.13")
CMAKE_LIMIT = Version("4")
# Source, objects and wheel take 0.4 GB with gloo; CUDA kernels for several GPUs take more.
DISK_BYTES = 2 * 1024**3

_DISTRIBUTIONS = (
    "tensorflow",
    "tensorflow-cpu",
    "tensorflow-gpu",
    "tf-nightly",
    "tf-nightly-cpu",
    "tensorflow-rocm",
)
_PYTHON_PACKAGES = {
    "cloudpickle": "cloudpickle",
    "packaging": "packaging",
    "pip": "pip",
    "psutil": "psutil",
    "pyyaml": "yaml",
    "setuptools": "setuptools",
    "wheel": "wheel",
}


@dataclasses.dataclass(frozen=True)
class TensorFlow:
    """An installed TensorFlow: its distribution's name and version."""

    distribution: str
    version: str


def installed_tensorflows() -> list[TensorFlow]:
    """Returns all installed distributions of TensorFlow, without importing it.

    Their files have the same names: two installed distributions overwrite each other.
    """
    return [
        TensorFlow(name, found.version)
        for name in _DISTRIBUTIONS
        for found in list(metadata.distributions(name=name))[:1]
    ]


def installed_tensorflow() -> TensorFlow:
    """Returns the installed TensorFlow, without importing it.

    Raises:
        BuildError: If TensorFlow is not installed.
    """
    for found in installed_tensorflows():
        return found
    raise BuildError(
        "TensorFlow must be installed, because Horovod is compiled against its headers.",
        received="no TensorFlow in this Python environment",
        fix='Install it first: pip install "tfdml[cpu]" or pip install "tfdml[gpu]".',
    )


def require_python_packages() -> None:
    """Checks that the packages imported by Horovod's own build are installed.

    Raises:
        BuildError: If one is missing.
    """
    missing = [n for n, module in _PYTHON_PACKAGES.items() if not importlib.util.find_spec(module)]
    if missing:
        raise BuildError(
            "The packages that Horovod's build imports must be installed.",
            received=f"missing {', '.join(missing)}",
            fix='Install them: pip install "tfdml[horovod]" (and python -m ensurepip for pip).',
        )


def find_compiler(environment: Mapping[str, str]) -> str:
    """Finds a C++ compiler and make.

    Args:
        environment: Environment variables of the build; PATH and CXX are read.

    Returns:
        Path of the compiler.

    Raises:
        BuildError: If the compiler or make is missing.
    """
    path = environment.get("PATH", "")
    candidates = [environment["CXX"]] if environment.get("CXX") else ["c++", "g++", "clang++"]
    compiler = next((p for c in candidates if (p := shutil.which(c, path=path))), None)
    install = "Install one: apt-get install g++ make (Debian, Ubuntu), dnf install gcc-c++ make."
    if compiler is None:
        raise BuildError(
            "A C++ compiler must be on PATH.",
            received=f"none of {', '.join(candidates)} in PATH={path}",
            fix=install,
        )
    if shutil.which("make", path=path) is None:
        raise BuildError("make must be on PATH.", received=f"PATH={path}", fix=install)
    return compiler


def find_cmake(environment: Mapping[str, str], scripts: str | None = None) -> str:
    """Finds a CMake that can build Horovod, first in this Python environment, then on PATH.

    Args:
        environment: Environment variables of the build; PATH is read.
        scripts: Directory of commands; this Python environment's by default.

    Returns:
        Path of the first CMake of a suitable version.

    Raises:
        BuildError: If no suitable CMake is found.
    """
    scripts = sysconfig.get_path("scripts") if scripts is None else scripts
    seen: dict[str, str] = {}
    for directory in (scripts, *environment.get("PATH", "").split(":")):
        cmake = shutil.which("cmake", path=directory) if directory else None
        if cmake is None or cmake in seen:
            continue
        version = _cmake_version(cmake, environment)
        if version is not None and CMAKE_MINIMUM <= version < CMAKE_LIMIT:
            return cmake
        seen[cmake] = str(version or "no version")
    found = ", ".join(f"{cmake} ({version})" for cmake, version in seen.items())
    raise BuildError(
        f"CMake must be at least {CMAKE_MINIMUM} and less than {CMAKE_LIMIT}.",
        received=found or "no cmake in this Python environment or on PATH",
        fix='Install one into this environment: pip install "cmake>=3.13,<4".',
    )


def require_mpi(environment: Mapping[str, str]) -> None:
    """Checks that MPI's compiler wrapper is available.

    Args:
        environment: Environment variables of the build; PATH and HOROVOD_MPICXX_SHOW are read.

    Raises:
        BuildError: If it is not on PATH.
    """
    if environment.get("HOROVOD_MPICXX_SHOW"):
        return
    if not any(shutil.which(c, path=environment.get("PATH", "")) for c in ("mpicxx", "mpic++")):
        raise BuildError(
            "MPI's compiler wrapper mpicxx must be on PATH to build with `--mpi`.",
            received=f"PATH={environment.get('PATH', '')}",
            fix="Install MPI (Debian, Ubuntu: apt-get install libopenmpi-dev), or leave out "
            "`--mpi`: gloo needs nothing.",
        )


def require_disk(directory: Path, needed: int = DISK_BYTES) -> int:
    """Checks that the disk has enough free space for a build.

    Args:
        directory: Existing directory of the file system to build on.
        needed: Required free space in bytes.

    Returns:
        Free space in bytes.

    Raises:
        BuildError: If less than `needed` is free.
    """
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise BuildError(
            f"Building Horovod needs {needed / 1024**3:.1f} GiB of free disk.",
            received=f"{free / 1024**3:.2f} GiB free at {directory}",
            fix="Free some, or set XDG_CACHE_HOME to a directory on a larger disk.",
        )
    return free


def _cmake_version(cmake: str, environment: Mapping[str, str]) -> Version | None:
    try:
        answer = subprocess.run(
            [cmake, "--version"],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"cmake version (\d+(?:\.\d+)*)", answer.stdout)
    return Version(match.group(1)) if match else None
