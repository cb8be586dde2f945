"""Check that the installed Horovod loads and was built for the installed TensorFlow."""

from importlib import metadata

from tfdml.cli.checks.finding import Finding, error, ok, warning
from tfdml.horovod_build.loaded import Loaded, load

_NAME = "Horovod"
BUILD = "Build it for the installed TensorFlow: tfdml build-horovod"
WITHOUT = (
    "Train without it under tfdml.MultiWorkerMirroredStrategy or tfdml.ParameterServerStrategy, or "
    "build it: tfdml build-horovod"
)


def check_horovod() -> tuple[Finding, Loaded | None]:
    """Checks that Horovod is installed and loads.

    Returns:
        Finding, and the properties of Horovod or None if it does not load.
    """
    try:
        version = metadata.version("horovod")
    except metadata.PackageNotFoundError:
        return warning(_NAME, "not installed: only HorovodStrategy needs it", WITHOUT), None
    loaded = load()
    if isinstance(loaded, str):
        return error(_NAME, f"{version} does not load:\n{loaded}", BUILD), None
    what = f"{loaded.version} with {', '.join(loaded.transports) or 'no transport'}"
    if loaded.built_against != loaded.tensorflow:
        return (
            error(
                _NAME,
                f"{what}, built against TensorFlow {loaded.built_against} and not "
                f"{loaded.tensorflow}",
                BUILD,
            ),
            loaded,
        )
    if not {"gloo", "mpi"} & set(loaded.transports):
        return error(_NAME, f"{what}: processes cannot talk to each other", BUILD), loaded
    return ok(_NAME, f"{what}, built against TensorFlow {loaded.built_against}"), loaded
