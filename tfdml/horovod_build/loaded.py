"""Loads Horovod in a process of its own and says what it was built with.

Run as `python -m tfdml.horovod_build.loaded`: a broken library can end this process without
ending the one that asks. The last line of the output is JSON.
"""

import dataclasses
import json

from tfdml.horovod_build import child

_SECONDS = 120


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What a Horovod that could be loaded says of itself.

    Attributes:
        version: Horovod's version.
        built_against: The TensorFlow version it was compiled against.
        tensorflow: The TensorFlow version it was loaded with.
        transports: Those it was built with, of gloo, mpi and nccl.
    """

    version: str
    built_against: str | None
    tensorflow: str
    transports: tuple[str, ...]


def load() -> Loaded | str:
    """Loads Horovod in a child process.

    Returns:
        What it says of itself; or, when it cannot be loaded, the end of the child's output.
    """
    ended = child.ask("tfdml.horovod_build.loaded", _SECONDS)
    if not ended.ok or not ended.lines:
        return "\n".join(ended.lines[-5:]) or f"exit code {ended.returncode}"
    facts = json.loads(ended.lines[-1])
    return Loaded(**{**facts, "transports": tuple(facts["transports"])})


def _say() -> None:
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
    _say()
