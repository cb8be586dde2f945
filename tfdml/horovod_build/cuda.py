"""Finds CUDA's compiler and NCCL for a GPU build, on the system or in installed wheels.

The `nvidia-cuda-nvcc` wheels of CUDA 13 contain a compiler; those of CUDA 12 do not. Wheels have
libraries only under versioned names, so a build gets folders of links.
"""

import dataclasses
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tfdml.horovod_build.changes import RPATH_VARIABLE
from tfdml.horovod_build.errors import BuildError

# Folder that CUDA's installers link to.
USUAL_HOME = Path("/usr/local/cuda")
NVCC_WHEELS = 'pip install "nvidia-cuda-nvcc==13.*" "nvidia-cuda-cccl==13.*"'
NCCL_WHEEL = "pip install nvidia-nccl-cu12"
# Files that a toolkit must contain.
_PARTS = ("bin/nvcc", "include/cuda_runtime.h", "lib/libcudart_static.a")
# Files that the wheels' folder must contain, and the wheel that provides each.
_WHEEL_PARTS = {
    "bin/nvcc": "nvidia-cuda-nvcc",
    "include/crt/host_config.h": "nvidia-cuda-crt",
    "include/cuda_runtime.h": "nvidia-cuda-runtime",
    "include/nv/target": "nvidia-cuda-cccl",
    "lib/libcudart_static.a": "nvidia-cuda-runtime",
    "nvvm/bin/cicc": "nvidia-nvvm",
}
_NCCL_VERSION = re.compile(r"#define\s+NCCL_(?:MAJOR|MINOR|PATCH)\s+(\d+)")
_LIBRARY_FOLDERS = ("lib64", "lib", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu")


@dataclasses.dataclass(frozen=True)
class Libraries:
    """CUDA and NCCL of a GPU build.

    Attributes:
        cuda: Folder of CUDA's compiler, headers and libraries.
        cuda_version: Version of the compiler, such as "13.0.88".
        nccl: Folder of NCCL's header and library.
        nccl_version: Version of NCCL, such as "2.27.7".
        wheels: Folder of the environment's NVIDIA wheels; `cuda` and `nccl` may be in it.
    """

    cuda: Path
    cuda_version: str
    nccl: Path
    nccl_version: str
    wheels: Path

    @property
    def nccl_is_a_wheel(self) -> bool:
        """True if NCCL comes from a wheel, where Horovod must find it when it is loaded."""
        return self.nccl.parent == self.wheels

    def facts(self) -> dict[str, str]:
        """Returns the facts that change Horovod's wheel, for the key of the cache."""
        origin = "wheel" if self.nccl_is_a_wheel else str(self.nccl)
        return {"cuda": self.cuda_version, "nccl": f"{self.nccl_version} ({origin})"}

    def variables(self, folder: Path, path: str) -> dict[str, str]:
        """Returns the build's variables for CUDA and NCCL; creates links to those in wheels.

        Args:
            folder: Existing folder for the links, needed until the build has ended.
            path: PATH of the build.
        """
        cuda, nccl = self.cuda, self.nccl
        if cuda.parent == self.wheels:
            cuda = _linked(cuda, folder / "cuda", ("bin", "include", "nvvm"))
        settings = {}
        if self.nccl_is_a_wheel:
            nccl = _linked(nccl, folder / "nccl", ("include",))
            settings["HOROVOD_NCCL_LINK"] = "SHARED"  # The wheel has no static library.
            # Relative to `horovod/tensorflow`, the folder of Horovod's library.
            settings[RPATH_VARIABLE] = "$ORIGIN/../../nvidia/nccl/lib"
        return {
            **settings,
            "HOROVOD_CUDA_HOME": str(cuda),
            "HOROVOD_NCCL_HOME": str(nccl),
            # Horovod asks the first `nvcc` which GPUs it can compile for.
            "PATH": f"{cuda / 'bin'}:{path}",
        }


def find(environment: Mapping[str, str], site: Path | None = None) -> Libraries:
    """Finds CUDA's compiler and NCCL.

    Args:
        environment: Environment variables of the command: HOROVOD_CUDA_HOME, CUDA_HOME,
            HOROVOD_NCCL_HOME and PATH are read.
        site: Folder of installed packages; this Python environment's by default.

    Returns:
        Folders and versions of CUDA and NCCL.

    Raises:
        BuildError: If one of them is missing, or a folder named by the user is incomplete.
    """
    wheels = (site or Path(sysconfig.get_path("purelib"))) / "nvidia"
    cuda = _find_cuda(environment, wheels)
    nccl = _find_nccl(environment, wheels, cuda)
    header = (nccl / "include/nccl.h").read_text(encoding="utf-8")
    version = ".".join(_NCCL_VERSION.findall(header))
    return Libraries(cuda, _compiler_version(cuda, environment), nccl, version, wheels)


def _find_cuda(environment: Mapping[str, str], wheels: Path) -> Path:
    looked = []
    for origin, home in _cuda_homes(environment, wheels):
        missing = _missing(home, home.parent == wheels)
        if not missing:
            return home
        looked.append(f"{origin}: {home} without {', '.join(missing)}")
        if origin == "HOROVOD_CUDA_HOME":
            break  # The user has chosen it.
    raise BuildError(
        "CUDA's compiler nvcc, its headers and its runtime must be installed to build with "
        "`--nccl`.",
        received="; ".join(looked),
        fix=f"Install them: {NVCC_WHEELS} (for GPUs of compute capability 7.5 and later, and "
        "drivers of 580 and later; the wheels of CUDA 12 hold no nvcc), or set HOROVOD_CUDA_HOME "
        "to the folder of a CUDA toolkit.",
    )


def _cuda_homes(environment: Mapping[str, str], wheels: Path) -> Iterator[tuple[str, Path]]:
    """Yields the origin and path of possible CUDA folders, those named by the user first."""
    for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME"):
        if environment.get(name):
            yield name, Path(environment[name])
    yield "wheels", wheels / "cu13"
    nvcc = shutil.which("nvcc", path=environment.get("PATH", ""))
    if nvcc is not None:
        yield "PATH", Path(nvcc).resolve().parents[1]
    yield "the usual place", USUAL_HOME


def _missing(home: Path, is_of_wheels: bool) -> list[str]:
    if not is_of_wheels:
        return [name for name in _PARTS if not any(p.exists() for p in _places(home, name))]
    missing = {n: wheel for n, wheel in _WHEEL_PARTS.items() if not (home / n).exists()}
    return [f"{name} ({wheel})" for name, wheel in missing.items()]


def _places(home: Path, name: str) -> list[Path]:
    """Returns the possible paths of a file in a toolkit: the library folder's name varies."""
    folder, _, file = name.rpartition("/")
    return [home / each / file for each in (_LIBRARY_FOLDERS if folder == "lib" else (folder,))]


def _find_nccl(environment: Mapping[str, str], wheels: Path, cuda: Path) -> Path:
    chosen = environment.get("HOROVOD_NCCL_HOME")
    homes = [Path(chosen)] if chosen else [wheels / "nccl", cuda, Path("/usr/local"), Path("/usr")]
    for home in homes:
        libraries = (home / folder for folder in _LIBRARY_FOLDERS)
        if (home / "include/nccl.h").exists() and any([*f.glob("libnccl*")] for f in libraries):
            return home
    raise BuildError(
        "NCCL's header include/nccl.h and its library libnccl must be installed to build with "
        "`--nccl`.",
        received=f"not both in {', '.join(map(str, homes))}",
        fix=f"Install it: {NCCL_WHEEL} (which tensorflow[and-cuda] brings), or set "
        "HOROVOD_NCCL_HOME to its folder.",
    )


def _linked(home: Path, folder: Path, parts: Sequence[str]) -> Path:
    """Creates a toolkit folder of links, with library names that have no version."""
    libraries = folder / "lib"
    libraries.mkdir(parents=True)
    for part in parts:
        (folder / part).symlink_to(home / part)
    for file in (home / "lib").iterdir():
        (libraries / file.name).symlink_to(file)
        name, versioned, _ = file.name.partition(".so.")
        if versioned:
            (libraries / f"{name}.so").symlink_to(file)
    (folder / "lib64").symlink_to(libraries)
    return folder


def _compiler_version(cuda: Path, environment: Mapping[str, str]) -> str:
    command = [str(cuda / "bin/nvcc"), "--version"]
    try:
        output = subprocess.run(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        output = str(error)
    version = re.search(r"\bV(\d+(?:\.\d+)+)", output)
    if version is None:
        raise BuildError(
            "CUDA's compiler must report its version.",
            received=f"{output.strip()[-300:]!r} from `{' '.join(command)}`",
            fix="Install it again, or set HOROVOD_CUDA_HOME to another CUDA toolkit.",
        )
    return version.group(1)
