"""Loads Horovod in a child process and reports what it was built with.

The child runs `python -m tfdml.horovod_build.loaded`: a broken library can crash it without
crashing the parent. The last line of its output is JSON.
"""

import dataclasses
import json

from tfdml.horovod_build import child

_SECONDS = 120


@dataclasses.dataclass(frozen=True)
class Loaded:
    """Properties of a Horovod that loads.

    Attributes:
        version: Version of Horovod.
        built_against: Version of TensorFlow that it was compiled against.
        tensorflow: Version of TensorFlow that it was loaded with.
        transports: Transports that it was built with, of gloo, mpi and nccl.
    """

    version: str
    built_against: str | None
    tensorflow: str
    transports: tuple[str, ...]


def load() -> Loaded | str:
    """Loads Horovod in a child process.

    Returns:
        Properties of Horovod or, if it does not load, the end of the child's output.
    """
    ended = child.ask("tfdml.horovod_build.loaded", _SECONDS)
    if not ended.ok or not ended.lines:
        return "\n".join(ended.lines[-5:]) or f"exit code {ended.returncode}"
    facts = json.loads(ended.lines[-1])
    return Loaded(**{**facts, "transports": tuple(facts["transports"])})


def _print_facts() -> None:
    from importlib import resources

    import horovod
    import horovod.tensorflow as hvd
    import tensorflow as tf

    text = resources.files("horovod").joinpath("metadata.json").read_text(encoding="utf-8")
    built = {"gloo": hvd.gloo_built(), "mpi": hvd.mpi_built(), "nccl": hvd.nccl_built()}
    facts = Loaded(
        version=horovod.__version__,
        built_against=json.loads(text).get("tensorflow"),
        tensorflow=tf.__version__,
        transports=tuple(name for name, yes in built.items() if yes),
    )
    print(json.dumps(dataclasses.asdict(facts)))


if __name__ == "__main__":
    _print_facts()
