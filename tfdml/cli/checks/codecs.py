"""The compiled operations of compressed training: whether they are there and load."""

import sys

from tfdml import topology
from tfdml.cli.checks.finding import Finding, ok, warning
from tfdml.horovod_build import child

_NAME = "Codecs"
_SECONDS = 120


def check_codecs() -> Finding:
    """Checks that the compiled codecs load: in a process of its own, which they could end."""
    ended = child.run(
        [sys.executable, "-m", "tfdml.cli.checks.codecs"],
        environment=topology.child_environment(TF_CPP_MIN_LOG_LEVEL="3"),
        timeout=_SECONDS,
    )
    lines = [line for line in ended.output.splitlines() if line.strip()]
    if ended.ok and lines and lines[-1] == "True":
        return ok(_NAME, "compiled, for compressed training on processors")
    if ended.ok and lines and lines[-1] == "False":
        return warning(
            _NAME,
            "not compiled: compressed training on processors is slower",
            "Compile them: tfdml build-codecs",
        )
    what = "\n".join(lines[-4:]) or f"exit code {ended.returncode}"
    return warning(_NAME, f"do not load:\n{what}", "Compile them: tfdml build-codecs --rebuild")


def _say() -> None:
    from tfdml import native

    print(native.load() is not None)


if __name__ == "__main__":
    _say()
