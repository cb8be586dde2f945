"""Checks that each missing requirement ends a build early, with one message that names the fix."""

import pytest

from tfdml.horovod_build import BuildError, BuildOptions
from tfdml.horovod_build import requirements as needs

CMAKE_4 = "echo 'cmake version 4.0.1'"


def cmake(version: str) -> str:
    return f"echo 'cmake version {version}'"


def assert_one_message(done, *parts: str) -> None:
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("error: ")
    for part in ("Received: ", *parts):
        assert part in done.stderr


def test_no_compiler(tfdml_command, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    done = tfdml_command(
        "build-horovod", "--wheel-dir", str(tmp_path), PATH=str(empty), XDG_CACHE_HOME=str(tmp_path)
    )
    assert_one_message(done, "A C++ compiler must be on PATH", str(empty), "apt-get install g++")


def test_compiler_of_the_environment(commands):
    path = str(commands(make=None, mycc="true"))
    assert needs.find_compiler({"PATH": path, "CXX": "mycc"}).endswith("mycc")
    with pytest.raises(BuildError, match=r"none of c\+\+, g\+\+, clang\+\+"):
        needs.find_compiler({"PATH": path})


def test_no_make(commands):
    path = str(commands(**{"g++": "true"}))
    with pytest.raises(BuildError, match="make must be on PATH"):
        needs.find_compiler({"PATH": path})


def test_cmake_4_on_path(environment_without, commands, tfdml_command, tmp_path):
    path = commands(**{"g++": None, "make": None, "cmake": CMAKE_4})
    done = tfdml_command(
        "build-horovod",
        "--wheel-dir",
        str(tmp_path / "wheels"),
        python=environment_without("cmake"),
        PATH=str(path),
        XDG_CACHE_HOME=str(tmp_path / "cache"),
    )
    assert_one_message(done, "less than 4", f"{path}/cmake (4.0.1)", 'pip install "cmake>=3.13,<4"')


@pytest.mark.parametrize(
    ("body", "received"),
    [
        (cmake("3.10.2"), r"3\.10\.2"),
        (cmake("4.2"), r"4\.2"),
        ("exit 1", "no version"),
        (None, "no cmake"),
    ],
)
def test_unsuitable_cmake(commands, body, received):
    path = commands(**({"cmake": body} if body else {}))
    with pytest.raises(BuildError, match=rf"at least 3\.13 and less than 4.*{received}"):
        needs.find_cmake({"PATH": f"{path}:/nonexistent"}, scripts="/nonexistent")


@pytest.mark.parametrize("version", ["3.13", "3.13.0", "3.31.10"])
def test_suitable_cmake(commands, version):
    path = commands(cmake=cmake(version))
    assert needs.find_cmake({"PATH": str(path)}, scripts="/nonexistent") == str(path / "cmake")


def test_a_suitable_cmake_is_found_behind_an_unsuitable_one(commands, tmp_path):
    new = tmp_path / "new"
    new.mkdir()
    (new / "cmake").write_text(f"#!/bin/sh\n{CMAKE_4}\n")
    (new / "cmake").chmod(0o755)
    old = commands(cmake=cmake("3.25"))
    assert needs.find_cmake({"PATH": f"{new}:{old}"}, scripts=str(new)) == str(old / "cmake")


def test_no_tensorflow(environment_without, tfdml_command, tmp_path):
    python = environment_without("tensorflow", "keras", "horovod")
    done = tfdml_command("build-horovod", python=python, XDG_CACHE_HOME=str(tmp_path))
    assert_one_message(done, "TensorFlow must be installed", 'pip install "tfdml[cpu]"')


def test_no_build_packages(environment_without, tfdml_command, commands, tmp_path):
    path = commands(**{"g++": None, "make": None, "cmake": cmake("3.25")})
    done = tfdml_command(
        "build-horovod",
        python=environment_without("cloudpickle", "wheel"),
        PATH=str(path),
        XDG_CACHE_HOME=str(tmp_path),
    )
    assert_one_message(done, "missing cloudpickle, wheel", 'pip install "tfdml[horovod]"')


def test_disk(tmp_path):
    free = needs.require_disk(tmp_path, needed=1)
    with pytest.raises(BuildError, match=r"free disk\. Received: .* GiB free at"):
        needs.require_disk(tmp_path, needed=2 * free)


def test_mpi_wrapper(commands):
    with pytest.raises(BuildError, match="mpicxx must be on PATH"):
        needs.require_mpi({"PATH": str(commands())})
    needs.require_mpi({"PATH": str(commands(mpicxx="true"))})


def test_neither_gloo_nor_mpi(tfdml_command):
    assert_one_message(tfdml_command("build-horovod", "--no-gloo", "--nccl"), "gloo or MPI")
    with pytest.raises(BuildError, match="gloo=False, mpi=False"):
        BuildOptions(gloo=False)


def test_cache_that_cannot_be_written(tfdml_command, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    done = tfdml_command("build-horovod", "--wheel-dir", str(blocked / "wheels"))
    assert_one_message(done, "must be writable", "--wheel-dir")
