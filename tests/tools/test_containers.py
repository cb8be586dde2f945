"""Checks the Dockerfile: lint, and an image, built on Debian, that trains on two processes."""

import json
import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests.tools.checkouts import ROOT, copy_of_the_checkout

# A base like the Dockerfile's own, made of Debian's packages, because the tests use no image
# registry.
PACKAGES = "python3,python3-venv,ca-certificates"
TRAIN = """
import json, os
import keras, numpy as np, tfdml
from tfdml.native import library

strategy = tfdml.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(100, 8)).astype("float32")
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
fitted = model.fit(x, x[:, :1], batch_size=32, epochs=2, verbose=0)
if strategy.is_chief:
    found = {"size": strategy.size, "loss": fitted.history["loss"], "user": os.getuid()}
    print(json.dumps({**found, "compiled": library.load() is not None, "at": tfdml.__file__}))
"""


def lint(file: Path) -> subprocess.CompletedProcess:
    places = [sysconfig.get_path("scripts"), *os.get_exec_path()]
    linter = shutil.which("hadolint", path=os.pathsep.join(places))
    if linter is None:
        pytest.skip("needs hadolint, which is packaged for x86_64 alone")
    return subprocess.run([linter, file], capture_output=True, text=True, timeout=60)


def test_dockerfile_has_no_lint():
    done = lint(ROOT / "Dockerfile")
    assert done.returncode == 0, done.stdout


def test_lint_is_seen(tmp_path):
    file = tmp_path / "Dockerfile"
    file.write_text((ROOT / "Dockerfile").read_text().replace("WORKDIR /source", "RUN cd source"))
    assert "DL3003" in lint(file).stdout


def test_image_is_built_of_tracked_files():
    """Each name that .dockerignore lets in exists, and what setup.py reads is among them."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    let_in = {line[1:] for line in lines if line.startswith("!")}
    assert all((ROOT / name).exists() for name in let_in)
    assert let_in >= {"setup.py", "pyproject.toml", "README.md", "LICENSE", "tfdml"}


class Builder:
    """buildah, with images of its own in a directory."""

    def __init__(self, directory: Path):
        places = ["--root", str(directory / "images"), "--runroot", str(directory / "state")]
        self._command = ["buildah", *places]

    def __call__(self, *arguments: str | Path, timeout: float = 300) -> str:
        """Runs a command of buildah's; returns what it prints."""
        command = [*self._command, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout.strip()


@pytest.fixture(scope="module")
def builder(tmp_path_factory):
    """Returns a buildah that has the image `base`; deletes its images afterwards."""
    if os.getuid() != 0 or not shutil.which("buildah") or not shutil.which("mmdebstrap"):
        pytest.skip("needs root, and Debian's packages buildah and mmdebstrap")
    directory = tmp_path_factory.mktemp("containers")
    archive = directory / "base.tar"
    bootstrap = ["mmdebstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", archive]
    subprocess.run(bootstrap, check=True, capture_output=True, timeout=600)
    buildah = Builder(directory)
    container = buildah("from", "scratch")
    buildah("add", "--quiet", container, archive, "/")
    buildah("commit", "--quiet", "--rm", container, "localhost/base")
    yield buildah
    # Layers are mounts that pytest's clean-up cannot delete.
    buildah("rm", "--all")
    buildah("rmi", "--all", "--force")


@pytest.fixture(scope="module")
def run(builder, tmp_path_factory):
    """Returns a function that runs a command in a container, with a script in /work."""
    context = copy_of_the_checkout(tmp_path_factory.mktemp("context"))
    # pip must trust what this machine trusts, which may be behind a proxy.
    certificates = "/etc/ssl/certs:/etc/ssl/certs:ro"
    options = ["--isolation", "chroot", "--volume", certificates]
    arguments = ["--build-arg", "BASE=localhost/base", "--tag", "localhost/tfdml"]
    builder("build", *options, *arguments, context, timeout=3000)
    container = builder("from", "localhost/tfdml")
    work = tmp_path_factory.mktemp("work")
    work.chmod(0o755)
    (work / "train.py").write_text(TRAIN)

    def run_command(*command: str, user: str = "root") -> str:
        options = ["--isolation", "chroot", "--user", user, "--volume", f"{work}:/work:ro"]
        return builder("run", *options, container, "--", *command)

    return run_command


def report(output: str) -> dict:
    """Returns what the training script has printed."""
    return json.loads(re.search(r"\{.*\}", output)[0])


@pytest.mark.slow
def test_image_trains_on_two_processes(run):
    """The numbers of one process, which here is another user's."""
    two = report(run("tfdml", "launch", "--workers", "2", "train.py"))
    one = report(run("python", "train.py", user="1000:1000"))
    assert (two["size"], one["size"], one["user"]) == (2, 1, 1000)
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-6)
    assert two["compiled"]
    assert two["at"].startswith("/opt/tfdml/")


@pytest.mark.slow
def test_image_has_no_compiler_and_no_source(run):
    found = run("sh", "-c", "command -v g++; command -v make; ls /source; true")
    assert found == ""


@pytest.mark.slow
def test_image_checks_itself(builder, run):
    """Its command is `tfdml test`, which trains under each installed strategy."""
    image = json.loads(builder("inspect", "--type", "image", "localhost/tfdml"))
    assert image["OCIv1"]["config"]["Cmd"] == ["tfdml", "test"]
    assert "MultiWorkerMirroredStrategy" in run("tfdml", "test")
