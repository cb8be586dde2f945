"""Checks the package: metadata, contents of sdist and wheel, and the version's single location."""

import ast
import hashlib
import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import tfdml
from tests.tools.checkouts import ROOT, copy_of_the_checkout, tracked_files
from tfdml.horovod_build.changes import ADDED

# Files left over in a checkout that was used.
STRAY = (
    "tfdml/native/operations-0123.so",
    "tfdml/data/notes.txt",
    "tfdml/data/__pycache__/reading.cpython-311.pyc",
    "tfdml/.coverage",
    "build/lib/tfdml/old.py",
    "demo/one/weights.h5",
    "docs/draft.bin",
    "notes.md",
    "tests/test_old.py",
)
# The text shipped by Debian and the Apache Software Foundation, with an empty appendix.
APACHE_2 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
# Created by `tfdml build-horovod`.
NOT_FROM_AN_INDEX = {"horovod"}


def setup_arguments() -> dict[str, ast.expr]:
    """Returns the arguments with which setup.py calls `setup`, without running it."""
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    (call,) = (
        n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "setup"
    )
    return {keyword.arg: keyword.value for keyword in call.keywords}


VERSION = ast.literal_eval(setup_arguments()["version"])


def run_wheel(checkout: Path) -> subprocess.CompletedProcess:
    """Runs `tools/wheel` in a copy of the checkout, with this checkout's .venv-wheel."""
    subprocess.run(
        [ROOT / "tools" / "bootstrap", "--environment", ".venv-wheel", "--empty"], check=True
    )
    (checkout / ".venv-wheel").symlink_to(ROOT / ".venv-wheel")
    command = [checkout / "tools" / "wheel"]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """Returns the output directory of `tools/wheel` for a checkout with stray files."""
    checkout = copy_of_the_checkout(tmp_path_factory.mktemp("built") / "checkout")
    for name in STRAY:
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_bytes(b"stray")
    done = run_wheel(checkout)
    assert done.returncode == 0, done.stdout + done.stderr
    # Twine's check; --strict makes a warning an error.
    assert done.stdout.count("PASSED") == 2, done.stdout
    return checkout / "dist"


@pytest.fixture(scope="module")
def wheel(built) -> zipfile.ZipFile:
    return zipfile.ZipFile(built / f"tfdml-{VERSION}-py3-none-any.whl")


@pytest.fixture(scope="module")
def metadata(wheel) -> Message:
    return message_from_string(wheel.read(f"tfdml-{VERSION}.dist-info/METADATA").decode())


def shipped() -> set[str]:
    """Returns all files of the package that git tracks."""
    return {name for name in tracked_files() if name.startswith("tfdml/")}


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    about = f"tfdml-{VERSION}.dist-info/"
    files = {name for name in wheel.namelist() if not name.startswith(about)}
    assert files == shipped()
    assert {"tfdml/py.typed", "tfdml/native/low_rank.cc", "tfdml/native/tensors.h"} <= files
    assert {f"tfdml/horovod_build/{added}" for added in ADDED.values()} <= files
    assert wheel.read(f"{about}licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert b"tfdml = tfdml.cli.main:main" in wheel.read(f"{about}entry_points.txt")


def test_the_sdist_holds_the_package_and_what_describes_it(built):
    with tarfile.open(built / f"tfdml-{VERSION}.tar.gz") as archive:
        names = {m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()}
    made = {name for name in names if name.startswith("tfdml.egg-info/")}
    described = {
        name
        for name in tracked_files()
        if name.startswith("docs/") and name.endswith((".md", ".png", ".svg"))
    } | {
        *("CHANGELOG.md", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py"),
        *({"CITATION.cff", "CONTRIBUTING.md", "SECURITY.md"} & tracked_files()),
    }
    assert names - made == shipped() | described | {"PKG-INFO", "setup.cfg"}


def test_metadata(metadata):
    assert metadata["Name"] == "tfdml"
    assert metadata["Version"] == VERSION
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert (
        metadata.get_payload().strip() == (ROOT / "README.md").read_text(encoding="utf-8").strip()
    )
    # No person is named without a way to contact them.
    for invented in ("Author", "Author-email", "Maintainer", "Home-page", "Project-URL"):
        assert metadata[invented] is None


def test_the_classifiers_name_the_supported_pythons(metadata):
    named = {
        c.rpartition(" ")[2]
        for c in metadata.get_all("Classifier")
        if re.search(r"Python :: 3\.\d+$", c)
    }
    allowed = SpecifierSet(metadata["Requires-Python"])
    assert named == {f"3.{minor}" for minor in range(30) if f"3.{minor}.0" in allowed}


def requirements(metadata: Message, extra: str) -> set[str]:
    """Returns the names of an extra's packages; if empty, of those that are always installed."""
    return {
        requirement.name
        for requirement in map(Requirement, metadata.get_all("Requires-Dist"))
        if (requirement.marker is None) == (not extra)
        and (not extra or requirement.marker.evaluate({"extra": extra}))
    }


def test_packages_for_records_are_an_extra(metadata):
    records = {"h5py", "pillow", "pyarrow"}
    assert requirements(metadata, "records") == records
    assert not requirements(metadata, "") & records
    for extra in ("recipes", "test"):
        assert requirements(metadata, extra) >= records
    assert requirements(metadata, "cpu") == {"tensorflow-cpu"}


def test_each_imported_package_is_a_requirement(metadata):
    """Every import of the package, anywhere, is provided by a requirement or an extra."""
    imported = set()
    for file in (ROOT / "tfdml").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.split(".")[0])
    known = {"PIL": "pillow", "tensorflow": "tensorflow-cpu"}
    asked_for = {
        canonicalize_name(Requirement(text).name) for text in metadata.get_all("Requires-Dist")
    }
    others = imported - set(sys.stdlib_module_names) - {"tfdml", *NOT_FROM_AN_INDEX}
    assert {canonicalize_name(known.get(name, name)) for name in others} <= asked_for


def test_the_version_is_written_in_one_place():
    assert tfdml.__version__ == VERSION
    written = re.compile(rf"(?<![\d.]){re.escape(VERSION)}(?![\d.])")
    paths = [
        name
        for name in tracked_files()
        if not name.startswith("tests/")
        if name.endswith((".py", ".toml", ".in", ".cfg", ".yml"))
        or (name.startswith("tools/") and "." not in name)
        if written.search((ROOT / name).read_text(encoding="utf-8"))
    ]
    assert paths == ["setup.py"]


def test_the_licence_is_the_standard_text():
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert hashlib.sha256(text.encode()).hexdigest() == APACHE_2


@pytest.mark.slow
def test_a_broken_description_is_refused(tmp_path):
    """`tools/wheel` fails if twine warns."""
    checkout = copy_of_the_checkout(tmp_path / "checkout")
    setup = (checkout / "setup.py").read_text(encoding="utf-8")
    (checkout / "setup.py").write_text(setup.replace("text/markdown", "text/x-rst"))
    (checkout / "README.md").write_text("Title\n==\n\n.. nothing::\n\n`unclosed\n")
    done = run_wheel(checkout)
    assert done.returncode != 0
    assert "FAILED" in done.stdout
