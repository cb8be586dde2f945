"""Check that the compiled operations of compressed training exist and load."""

from tfdml.cli.checks.finding import Finding, ok, warning
from tfdml.horovod_build import child

_NAME = "Codecs"
_SECONDS = 120


def check_codecs() -> Finding:
    """Checks that the compiled codecs load, in a child process because they could crash it."""
    ended = child.ask("tfdml.cli.checks.codecs", _SECONDS)
    loads = ended.lines[-1:] if ended.ok else None
    if loads == ["True"]:
        return ok(_NAME, "compiled, for compressed training on processors")
    if loads == ["False"]:
        return warning(
            _NAME,
            "not compiled: compressed training on processors is slower",
            "Compile them: tfdml build-codecs",
        )
    what = "\n".join(ended.lines[-4:]) or f"exit code {ended.returncode}"
    return warning(_NAME, f"do not load:\n{what}", "Compile them: tfdml build-codecs --rebuild")


def _print_facts() -> None:
    from tfdml import native

    print(native.load() is not None)


if __name__ == "__main__":
    _print_facts()
