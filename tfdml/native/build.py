"""Compilation of the C++ operations for the installed TensorFlow."""

import os
import tempfile
from pathlib import Path

import tensorflow as tf

from tfdml import topology
from tfdml.horovod_build import child, requirements
from tfdml.horovod_build.errors import BuildError
from tfdml.horovod_build.source_archive import last_lines
from tfdml.native import library

# Time limit of the compilation; two cores need half a minute.
_SECONDS = 1800


def build(rebuild: bool = False) -> tuple[Path, bool]:
    """Compiles the operations, unless the compiled file exists.

    Args:
        rebuild: Whether to compile even if it exists.

    Returns:
        The file, and whether it was compiled by this call.

    Raises:
        BuildError: If the processor or the compiler is not supported, the compilation fails, or the
            directory is not writable.
    """
    target = library.path()
    if target.exists() and not rebuild:
        return target, False
    if not library.supports_processor():
        raise BuildError(
            "The processor must have AVX2 and FMA, or be a 64-bit ARM.",
            received="one that has neither",
            fix="Nothing to do: TensorFlow's own operations are used, with the same results.",
        )
    environment = topology.child_environment()
    compiler = requirements.find_compiler(environment)
    try:
        with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as scratch:
            file = Path(scratch) / target.name
            _compile(compiler, file, environment)
            # Atomic, so that other processes never see a partial file.
            os.replace(file, target)
        # Files for another TensorFlow are kept: a checkout may have several environments.
        for old in target.parent.glob(f"{target.name.rpartition('-')[0]}-*.so"):
            if old != target:
                old.unlink(missing_ok=True)
    except OSError as error:
        raise BuildError(
            f"The directory {target.parent} must be writable.",
            received=str(error),
            fix="Install tfdml into an environment where you may write.",
        ) from error
    return target, True


def _compile(compiler: str, file: Path, environment: dict[str, str]) -> None:
    # One compilation for all sources: parsing TensorFlow's headers takes longer than each of them.
    sources = [str(source) for source in library.SOURCES if source.suffix == ".cc"]
    included = [part for source in sources for part in ("-include", source)]
    command = [compiler, *included, "-x", "c++", os.devnull, "-o", str(file), *library.flags()]
    ended = child.run(
        [*command, *tf.sysconfig.get_link_flags()], environment=environment, timeout=_SECONDS
    )
    if not ended.ok or not file.exists():
        errors = "\n".join(line for line in ended.output.splitlines() if "error:" in line)
        raise BuildError(
            "The operations must compile against TensorFlow's headers.",
            received=last_lines(errors or ended.output, 5) or f"exit code {ended.returncode}",
            fix="Try another compiler with CXX, or do nothing: TensorFlow's own operations are "
            "used, with the same results.",
        )
