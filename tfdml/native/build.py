"""Compiling the operations for the installed TensorFlow."""

import os
import tempfile
from pathlib import Path

import tensorflow as tf

from tfdml import topology
from tfdml.horovod_build import child, requirements
from tfdml.horovod_build.errors import BuildError
from tfdml.horovod_build.source import last_lines
from tfdml.native import library

# Two cores take half a minute.
_SECONDS = 1800


def build(rebuild: bool = False) -> tuple[Path, bool]:
    """Compiles the operations, unless they are there.

    Args:
        rebuild: Compile even then.

    Returns:
        The file, and whether it was compiled now.

    Raises:
        BuildError: If the processor, the compiler or the directory does not do.
    """
    target = library.path()
    if target.exists() and not rebuild:
        return target, False
    if not library.supports_processor():
        raise BuildError(
            "The processor must have AVX2 and FMA, or be a 64-bit ARM.",
            received="one that has not",
            fix="Go on without: TensorFlow's own operations are used, with the same results.",
        )
    environment = topology.child_environment()
    compiler = requirements.find_compiler(environment)
    try:
        with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as scratch:
            file = Path(scratch) / target.name
            _compile(compiler, file, environment)
            # In one step, so that what is there is always whole.
            os.replace(file, target)
        # Those for another TensorFlow may be in use: a checkout may have several environments.
        for old in target.parent.glob(f"{target.name.rpartition('-')[0]}-*.so"):
            if old != target:
                old.unlink(missing_ok=True)
    except OSError as error:
        raise BuildError(
            f"The directory {target.parent} must be writable.",
            received=str(error),
            fix="Install tfdml into an environment of your own.",
        ) from error
    return target, True


def _compile(compiler: str, file: Path, environment: dict[str, str]) -> None:
    # All in one go: reading TensorFlow's headers takes longer than what is made of each file.
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
            fix="Try another compiler by CXX, or go on without: TensorFlow's own operations are "
            "used, with the same results.",
        )
