"""Checks of versions against the supported ranges in tfdml's installed metadata."""

import platform
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tfdml.cli.checks.finding import Finding, error, ok, warning
from tfdml.horovod_build.errors import BuildError
from tfdml.horovod_build.requirements import installed_tensorflow, installed_tensorflows


def supported_ranges() -> dict[str, SpecifierSet]:
    """Reads the supported versions of Python, TensorFlow and Keras.

    Returns:
        Ranges by the names `python`, `tensorflow` and `keras`; empty if tfdml is used from its
        source without being installed.
    """
    try:
        described = metadata.metadata("tfdml")
    except metadata.PackageNotFoundError:
        return {}
    ranges = {"python": SpecifierSet(described["Requires-Python"])}
    for text in described.get_all("Requires-Dist") or ():
        requirement = Requirement(text)
        if requirement.name == "keras":
            ranges["keras"] = requirement.specifier
        elif requirement.name == "tensorflow-cpu":
            ranges["tensorflow"] = requirement.specifier
    return ranges


def check_tfdml() -> Finding:
    """Checks that tfdml is installed, not only importable."""
    try:
        return ok("tfdml", metadata.version("tfdml"))
    except metadata.PackageNotFoundError:
        return warning(
            "tfdml",
            "used from its source without being installed: supported versions are unknown",
            "Install it: pip install -e . in the checkout.",
        )


def check_python() -> Finding:
    """Checks the version of Python."""
    return _in_range("Python", platform.python_version(), "python", "a Python")


def check_tensorflow() -> Finding:
    """Checks the installed version of TensorFlow, and that only one distribution is installed."""
    try:
        found = installed_tensorflow()
    except BuildError as missing:
        return error("TensorFlow", "not installed", str(missing))
    several = installed_tensorflows()
    if len(several) > 1:
        return error(
            "TensorFlow",
            " and ".join(f"{each.distribution} {each.version}" for each in several)
            + ": installed over each other",
            f"Keep one: pip uninstall {' '.join(each.distribution for each in several)}, then "
            f"pip install the one that you want.",
        )
    finding = _in_range("TensorFlow", found.version, "tensorflow", f"{found.distribution}")
    if Version(found.version) < Version("2.16"):
        return error("TensorFlow", f"{found.version}: comes with Keras 2", finding.fix)
    return finding


def check_keras() -> Finding:
    """Checks the installed version of Keras."""
    try:
        version = metadata.version("keras")
    except metadata.PackageNotFoundError:
        return error("Keras", "not installed", "Install it: pip install keras.")
    finding = _in_range("Keras", version, "keras", "keras")
    if Version(version) < Version("3"):
        return error("Keras", f"{version}: tfdml is for Keras 3", finding.fix)
    return finding


def known_problems() -> list[tuple[str, str, str]]:
    """Returns upstream problems of the installed versions that have a workaround.

    Returns:
        Problem, upstream thread and replacement, for each problem that applies.
    """
    keras_3 = _at_least("keras", "3")
    problems = [
        (
            keras_3,
            "hvd.DistributedOptimizer exchanges nothing, its callbacks crash, with Keras 3",
            "horovod/horovod#4290",
            "tfdml.HorovodStrategy",
        ),
        (
            keras_3,
            "tf.distribute.MultiWorkerMirroredStrategy crashes in fit with Keras 3",
            "keras-team/keras#20585, tensorflow/tensorflow#72388",
            "tfdml.MultiWorkerMirroredStrategy",
        ),
        (
            keras_3,
            "fit refuses tf.distribute.ParameterServerStrategy with Keras 3",
            "keras-team/keras#18624",
            "tfdml.ParameterServerStrategy",
        ),
        (
            _tensorflow_at_least("2.21"),
            "Horovod's source does not compile against this TensorFlow",
            "horovod/horovod#4302",
            "tfdml build-horovod",
        ),
    ]
    return [(what, thread, instead) for applies, what, thread, instead in problems if applies]


def _in_range(name: str, version: str, key: str, what: str) -> Finding:
    allowed = supported_ranges().get(key)
    if allowed is None or allowed.contains(version, prereleases=True):
        return ok(name, version if allowed is None else f"{version}  (supported: {allowed})")
    return warning(
        name,
        f"{version}, which tfdml was not tested with",
        f"Use {what} of the supported versions {allowed}.",
    )


def _at_least(distribution: str, version: str) -> bool:
    try:
        return Version(metadata.version(distribution)) >= Version(version)
    except metadata.PackageNotFoundError:
        return False


def _tensorflow_at_least(version: str) -> bool:
    try:
        return Version(installed_tensorflow().version) >= Version(version)
    except BuildError:
        return False
