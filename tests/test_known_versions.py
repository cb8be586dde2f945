"""Checks untested versions of Keras and TensorFlow: a warning, or an error naming the change."""

import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import keras
import pytest
import tensorflow as tf
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tests.tools.checkouts import ROOT
from tfdml import known_versions
from tools import seam_digests

INSTALLED = {"keras": keras.__version__, "tensorflow": tf.__version__}
LIBRARIES = sorted(INSTALLED)
TRAINER = "keras.src.backend.tensorflow.trainer"
FIT = f"{TRAINER}.TensorFlowTrainer.fit"
# Texts in the trainer, and their replacements.
_LINE = "        if max_epochs and"
ANOTHER_FIT = (_LINE, "        if True and max_epochs and")
ANOTHER_COMMENT = (_LINE, f"        # Another comment.\n\n{_LINE}")
# Prints the output of a process with another Keras when a strategy is created.
STRATEGY = """
import sys, warnings
import keras
{before}
warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as caught:
    try:
        import tfdml
        tfdml.MirroredStrategy()
    except ImportError as error:
        print("refused:", error)
    else:
        print("made")
for warning in caught:
    if "tfdml" in str(warning.message):
        print("warned:", warning.message)
"""


def supported(library: str) -> SpecifierSet:
    """Returns the range of setup.py."""
    name = {"keras": "keras", "tensorflow": "tensorflow-cpu"}[library]
    text = (ROOT / "setup.py").read_text(encoding="utf-8")
    return SpecifierSet(re.search(rf'"{name}([<>=][^"]*)"', text).group(1))


def next_minor(library: str) -> str:
    newest = known_versions.known_releases(library)[-1]
    return f"{newest.major}.{newest.minor + 1}.0"


def next_patch() -> str:
    major, minor, _ = keras.__version__.split(".")
    return f"{major}.{minor}.99"


def different_from_the_newest(library: str) -> list[str]:
    """Returns the differences between the installed release and the newest known one."""
    newest = known_versions.known_releases(library)[-1]
    return known_versions.changed_since(library, newest)


def made_with(path: Path | None = None, before: str = "") -> str:
    """Returns the output of a process that creates a strategy."""
    done = subprocess.run(
        [sys.executable, "-c", STRATEGY.format(before=before)],
        env={"PYTHONPATH": f"{path}:{ROOT}" if path else str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def other_keras(tmp_path):
    """Copies the installed Keras, with another version and a changed text in its trainer."""

    def copy(version: str, trainer: tuple[str, str]) -> Path:
        ignored = shutil.ignore_patterns("*_test.py", "__pycache__")
        shutil.copytree(Path(keras.__file__).parent, tmp_path / "keras", ignore=ignored)
        for name, (old, new) in {
            "version.py": (f'"{keras.__version__}"', f'"{version}"'),
            "backend/tensorflow/trainer.py": trainer,
        }.items():
            file = tmp_path / "keras" / "src" / name
            text = file.read_text(encoding="utf-8")
            assert old in text
            file.write_text(text.replace(old, new), encoding="utf-8")
        return tmp_path

    return copy


@pytest.mark.parametrize("library", LIBRARIES)
def test_digests_cover_all_replaced_functions(library):
    known = known_versions.known_sources()[library]
    assert sorted(known) == [f for f in seam_digests.replaced() if f.startswith(library)]
    assert len(known) > 20
    assert known_versions.changed_since(library, Version(INSTALLED[library])) == []
    releases = set(known_versions.known_releases(library))
    assert all(
        {Version(r) for rs in known[f].values() for r in rs.split()} == releases for f in known
    )


@pytest.mark.parametrize("library", LIBRARIES)
def test_supported_minor_versions_are_known(library):
    known = known_versions.known_releases(library)
    minors = {r.release[:2] for r in known}
    allowed = {
        (known[0].major, n) for n in range(100) if f"{known[0].major}.{n}.0" in supported(library)
    }
    assert minors == allowed


@pytest.mark.parametrize("library", LIBRARIES)
def test_known_release_prints_nothing(library):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        known_versions.check(library, INSTALLED[library])
        known_versions.check(library, f"{INSTALLED[library]}+local")


@pytest.mark.parametrize("library", LIBRARIES)
def test_unchanged_patch_release_prints_nothing(library):
    major, minor, _ = INSTALLED[library].split(".")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        known_versions.check(library, f"{major}.{minor}.99")


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_newer_minor_version(library):
    version, changed = next_minor(library), different_from_the_newest(library)
    if changed:  # If the installed release is an older one.
        with pytest.raises(ImportError, match=re.escape(f"changed are {', '.join(changed)}.")):
            known_versions.check(library, version)
    else:
        with pytest.warns(
            UserWarning, match=rf"{version}, .*: the functions that it replaces are the same"
        ):
            known_versions.check(library, version)


@pytest.mark.parametrize(
    ("library", "version"),
    [("keras", "3.13.2"), ("keras", "4.0.0"), ("keras", "2.15.0"), ("tensorflow", "2.19.1")],
)
def test_an_older_minor_and_another_major_version_are_refused(library, version):
    with pytest.raises(ImportError, match=rf"must be .* to .* Received: \w+ {version}\. Run `pip"):
        known_versions.check(library, version)


def test_a_newer_keras_with_another_fit_is_refused(other_keras):
    """Only the changed functions are named."""
    refused = made_with(other_keras(next_minor("keras"), ANOTHER_FIT))
    assert refused.startswith("refused:")
    named = re.search(r"changed are (.*?)\. Run", refused).group(1).split(", ")
    assert named == sorted({FIT, *different_from_the_newest("keras")})


@pytest.mark.slow
def test_newer_keras_without_a_class_is_refused(other_keras):
    """The message comes before an import of the class would fail."""
    refused = made_with(other_keras(next_minor("keras"), ("TFEpochIterator", "Epochs")))
    assert refused.startswith("refused:")
    assert f"{TRAINER}.TFEpochIterator._get_iterator" in refused


@pytest.mark.slow
def test_a_patch_release_with_another_fit_is_warned_of(other_keras):
    output = made_with(other_keras(next_patch(), ANOTHER_FIT))
    assert output.startswith("made")
    assert f"warned: tfdml was not tested with Keras {next_patch()}" in output
    assert f"it differs in {FIT}." in output


@pytest.mark.slow
def test_comments_do_not_change_digests(other_keras):
    assert made_with(other_keras(next_patch(), ANOTHER_COMMENT)) == "made\n"


ANOTHER_TAPE = """
import tensorflow as tf
def gradient(self, target, sources, output_gradients=None, unconnected_gradients=None):
    raise NotImplementedError
tf.__version__ = "{version}"
tf.GradientTape.gradient = gradient
"""


def test_a_newer_tensorflow_with_another_tape_is_refused(tmp_path):
    (tmp_path / "another_tape.py").write_text(ANOTHER_TAPE.format(version=next_minor("tensorflow")))
    refused = made_with(tmp_path, "import another_tape")
    assert refused.startswith(
        f"refused: TensorFlow {next_minor('tensorflow')} must have the functions"
    )
    assert "changed are tensorflow.python.eager.backprop.GradientTape.gradient. Run" in refused
