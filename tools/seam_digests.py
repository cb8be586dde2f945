"""Writes digests of the functions of the installed Keras and TensorFlow that tfdml replaces.

    python -m tools.seam_digests

Digests of other releases are kept. Run it in an environment of each release to support, after
reviewing its changes: `tools/bootstrap --environment .venv-new --keras 3.16`.
"""

import json
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfdml import known_versions

FILE = Path(known_versions.__file__).with_name("known_sources.json")
RELEASES = {"keras": keras.__version__, "tensorflow": tf.__version__}


def main() -> None:
    """Rewrites the file with the installed releases added."""
    # First with the known functions: the strategies reject a release that is not in the file.
    write(f for functions in known_versions.known_sources().values() for f in functions)
    write(replaced())


def write(functions: Iterable[str]) -> None:
    """Writes the file with these functions, as `module:Class.function`, and no others."""
    before = known_versions.known_sources()
    after: known_versions.Sources = {library: {} for library in RELEASES}
    for function in functions:
        library = function.partition(".")[0]
        digests = before[library].get(function, {})
        after[library][function] = with_release(digests, function, RELEASES[library])
    FILE.write_text(json.dumps(after, indent=1) + "\n", encoding="utf-8")


def with_release(digests: dict[str, str], function: str, release: str) -> dict[str, str]:
    """Returns the releases of a function by digest, with an installed release added."""
    releases = {d: [r for r in rs.split() if r != release] for d, rs in digests.items()}
    releases.setdefault(known_versions.digest(function), []).append(release)
    return {d: " ".join(sorted(rs)) for d, rs in releases.items() if rs}


def replaced() -> list[str]:
    """Returns all functions that tfdml replaces or overrides."""
    from tfdml.strategies import tensorflow_seam
    from tfdml.strategies.keras_seam import parameter_servers, seam
    from tfdml.strategies.parameter_server.extended import ParameterServerExtended
    from tfdml.strategies.replicas.extended import ReplicaExtended

    seams = [*seam.REPLACEMENTS, *parameter_servers.REPLACEMENTS]
    named = [(owner, name) for owner, name, _ in seams] + tensorflow_seam.REPLACED
    for extended in (ReplicaExtended, ParameterServerExtended):
        named += overridden(extended)
    return sorted({_address(owner, name) for owner, name in named})


def overridden(extended: type) -> Iterator[tuple[type, str]]:
    """Yields TensorFlow's methods that a strategy overrides, each with its class."""
    own = [c for c in extended.__mro__ if c.__module__.startswith("tfdml.")]
    theirs = [c for c in extended.__mro__ if c.__module__.startswith("tensorflow.")]
    for name in {name for c in own for name, value in vars(c).items() if _is_method(value)}:
        yield from [(c, name) for c in theirs if name in vars(c)][:1]


def _is_method(value: Any) -> bool:
    return isinstance(value, types.FunctionType | property)


def _address(owner: Any, name: str) -> str:
    if isinstance(owner, type):
        return f"{owner.__module__}:{owner.__qualname__}.{name}"
    return f"{owner.__name__}:{name}"


if __name__ == "__main__":
    main()
