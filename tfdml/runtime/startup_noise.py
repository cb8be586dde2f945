"""Filter for TensorFlow's start-up lines that a user cannot act on.

Every process writes absl's notice about early messages, and the information lines of oneDNN,
cpu_feature_guard and cudart, before it reads `TF_CPP_MIN_LOG_LEVEL`. Warnings and errors are never
filtered. Run as a script, it copies its input without these lines:

    python train.py 2> >(python -m tfdml.runtime.startup_noise >&2)

Only the standard library is imported: the script must be running before TensorFlow starts.
"""

import contextlib
import importlib.abc
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType

_SOURCES = "port|cpu_feature_guard|cudart_stub"
_NOISE = re.compile(
    # Prefix that horovodrun and mpirun add to a rank's line.
    r"(?:\[[\d,]+\]<stderr>:)?(?:"
    # "I0000 00:00:1700000000.000000 123 port.cc:153] ...", and the same after TensorFlow's date.
    rf"I0000 \d\d:\d\d:[\d.]+ +\d+ (?:{_SOURCES})\.cc:\d+\] "
    rf"|\d{{4}}-\d\d-\d\d \d\d:\d\d:[\d.]+: I \S+/(?:{_SOURCES})\.cc:\d+\] "
    r"|WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR$"
    r"|To enable the following instructions: .* rebuild TensorFlow with the appropriate compiler)"
)


def is_noise(line: str) -> bool:
    """Returns whether a line, without its end, is one of TensorFlow's known start-up lines."""
    return _NOISE.match(line) is not None


@contextlib.contextmanager
def filtered_stderr() -> Iterator[None]:
    """Context manager that filters this process's standard error, including that of C++ code.

    A separate process copies the lines, so they arrive even if this process is killed. If it cannot
    be started, or standard error is closed, nothing is filtered.
    """
    if sys.stderr is None:
        yield
        return
    sys.stderr.flush()
    saved_stderr = os.dup(2)
    # -I ignores the user's environment, which may shadow a module of the standard library.
    command = [sys.executable, "-I", "-S", __file__]
    try:
        # A new session, so that Ctrl-C reaches only this process; the copier ends with its input.
        copier = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=saved_stderr, start_new_session=True
        )
    except OSError:
        os.close(saved_stderr)
        yield
        return
    os.dup2(copier.stdin.fileno(), 2)
    copier.stdin.close()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(saved_stderr, 2)
        os.close(saved_stderr)
        # A child started in the meantime may hold the other end open for as long as it lives.
        with contextlib.suppress(subprocess.TimeoutExpired):
            copier.wait(1.0)


class _TensorFlowFinder(importlib.abc.MetaPathFinder):
    """Finder that filters the output of importing TensorFlow; other finders locate it."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        """Returns TensorFlow's spec with a filtered loader; None for all other modules."""
        if name != "tensorflow":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_quietly(module: ModuleType) -> None:
                with filtered_stderr():
                    load(module)

            spec.loader.exec_module = load_quietly
        return spec


def filter_import_of_tensorflow() -> None:
    """Filters the output of importing TensorFlow, unless this process has already imported it."""
    if "tensorflow" not in sys.modules:
        sys.meta_path.insert(0, _TensorFlowFinder())


def main() -> None:
    """Copies standard input to standard output without the noise lines."""
    for raw in sys.stdin.buffer:
        if not is_noise(raw.decode(errors="replace").rstrip("\r\n")):
            sys.stdout.buffer.write(raw)
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
