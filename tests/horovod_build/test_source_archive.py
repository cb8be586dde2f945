"""Checks fetching, patching and compiling Horovod's source, and the messages of failures."""

import io
import os
import re
import tarfile

import pytest

from tfdml.horovod_build import BuildError, source_archive
from tfdml.horovod_build.build import compile_wheel
from tfdml.horovod_build.changes import ADDED, CHANGES, added_file

ROOT = f"horovod-{source_archive.VERSION}"
LISTING = "horovod/tensorflow/CMakeLists.txt"
OPERATIONS = "horovod/tensorflow/mpi_ops.cc"
CONTEXTS = "horovod/common/gloo/gloo_context.cc"
ALL_TO_ALL, ALL_GATHER = (f"third_party/gloo/gloo/all{way}v.cc" for way in ("toall", "gather"))
LOOP = "horovod/common/operations.cc"
QUEUE_HEADER, QUEUE = (f"horovod/common/tensor_queue.{kind}" for kind in ("h", "cc"))


def archive_with(path, files: dict[str, str]):
    with tarfile.open(path, "w:gz") as opened:
        for name, text in files.items():
            member = tarfile.TarInfo(f"{ROOT}/{name}")
            member.size = len(text)
            opened.addfile(member, io.BytesIO(text.encode()))
    return path


FILES = {
    name: "".join(["before\n", *(text for text, _ in changes), "after\n"])
    for name, changes in CHANGES.items()
}


def test_patched_parts_of_the_source(tmp_path):
    root = source_archive.unpack(archive_with(tmp_path / "a.tar.gz", FILES), tmp_path)
    assert "xla_mpi_ops" not in (root / LISTING).read_text()
    finalize = "void GlooContext::Finalize() {\n  direct_exchange.reset();\n"
    assert (root / CONTEXTS).read_text().startswith(f"before\n{finalize}#include")


def test_nothing_calls_the_all_reduce_of_gloo(tmp_path):
    root = source_archive.unpack(archive_with(tmp_path / "a.tar.gz", FILES), tmp_path)
    callers = {name: (root / name).read_text() for name in CHANGES if name.startswith("horovod/")}
    assert not [name for name, text in callers.items() if "gloo::allreduce" in text]
    runs = {name: text.count("AllReduce(b") for name, text in callers.items()}
    assert sorted(runs.values())[-2:] == [1, 2]
    for path, name in ADDED.items():
        assert (root / path).read_text() == added_file(name).read_text()
        # CMake compiles it.
        if path.endswith(".cc"):
            assert path in (root / "CMakeLists.txt").read_text()


def test_a_library_for_gpus_can_be_loaded(tmp_path):
    root = source_archive.unpack(archive_with(tmp_path / "a.tar.gz", FILES), tmp_path)
    # Uses a method that TensorFlow defines in a header.
    operations = (root / OPERATIONS).read_text()
    assert "inline GpuStreamHandle AsGpuStreamValue" in operations
    assert operations.index("stream.h") < operations.index("platform_specific_handle()")
    # Without the folder in which it was linked, which no longer exists by then.
    assert 'INSTALL_RPATH "$ENV{TFDML_HOROVOD_RPATH}"' in (root / LISTING).read_text()


def test_receives_are_posted_before_sends(tmp_path):
    root = source_archive.unpack(archive_with(tmp_path / "a.tar.gz", FILES), tmp_path)
    to_all = (root / ALL_TO_ALL).read_text()
    # First all of the receiving loop, then all of the sending: two ranks have one connection.
    assert re.findall(r"for |->recv|->send", to_all) == ["for ", "->recv", "for ", "->send"]
    gathered = (root / ALL_GATHER).read_text()
    assert re.findall(r"if |->recv|->send", gathered) == [
        "if ", "->recv", "->send", "->recv", "->send",
    ]  # fmt: skip


def test_rank_waits_for_queued_tensors(tmp_path):
    root = source_archive.unpack(archive_with(tmp_path / "a.tar.gz", FILES), tmp_path)
    assert "tensor_queue.WaitForTensors(" in (root / LOOP).read_text()
    assert (root / QUEUE_HEADER).read_text().count("arrived_") == 2
    # With one queued tensor or several.
    announced = re.findall(r"push\(std::move\((.*)\)\);|(notify_one)", (root / QUEUE).read_text())
    assert [a or b for a, b in announced] == ["message", "notify_one", "messages[i]", "notify_one"]


@pytest.mark.parametrize("name", CHANGES)
def test_unexpected_source_is_refused(tmp_path, name):
    archive = archive_with(tmp_path / "a.tar.gz", {**FILES, name: "something else\n"})
    with pytest.raises(BuildError, match="must contain exactly once: .* Received: it 0 times"):
        source_archive.unpack(archive, tmp_path)


def test_no_network(tmp_path):
    # A damaged archive in the cache must not be used; then pip finds nothing.
    (tmp_path / source_archive.ARCHIVE).write_bytes(b"not the archive")
    log = tmp_path / "log"
    offline = {
        **{k: v for k, v in os.environ.items() if not k.startswith("PIP_")},
        "PIP_NO_INDEX": "1",
        "PIP_CONFIG_FILE": os.devnull,
    }
    with pytest.raises(BuildError, match="Without a network, copy horovod-") as caught:
        source_archive.fetch(tmp_path, offline, log)
    assert caught.value.log == log
    assert str(log) in str(caught.value)
    assert "horovod==0.28.1" in log.read_text()


def test_wrong_archive_is_refused(tmp_path):
    elsewhere = tmp_path / "links"
    elsewhere.mkdir()
    root = f"horovod-{source_archive.VERSION}"
    with tarfile.open(elsewhere / source_archive.ARCHIVE, "w:gz") as opened:
        for name, text in {
            f"{root}/PKG-INFO": "Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n",
            f"{root}/setup.py": "from setuptools import setup\n"
            "setup(name='horovod', version='0.28.1', packages=[])\n",
        }.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            opened.addfile(member, io.BytesIO(text.encode()))
    variables = {
        **{k: v for k, v in os.environ.items() if not k.startswith("PIP_")},
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(elsewhere),
        "PIP_CONFIG_FILE": os.devnull,
    }
    with pytest.raises(BuildError, match="must be the published archive"):
        source_archive.fetch(tmp_path / "sources", variables, tmp_path / "log")
    assert not (tmp_path / "sources" / source_archive.ARCHIVE).exists()


def test_failed_build_shows_the_error_and_names_the_log(tmp_path):
    root = tmp_path / "source"
    root.mkdir()
    (root / "setup.py").write_text(
        "import sys; from setuptools import setup\n"
        "if 'bdist_wheel' in sys.argv:\n"
        "    print('mpi_ops.cc:7:1: fatal error: no such header', flush=True)\n"
        "    raise SystemExit(2)\n"
        "setup(name='horovod', version='0.28.1')\n"
    )
    log = tmp_path / "log"
    with pytest.raises(BuildError, match="must end with a wheel, but it failed") as caught:
        compile_wheel(root, tmp_path / "wheel", dict(os.environ), log, report=lambda line: None)
    assert "fatal error: no such header" in str(caught.value)
    assert str(caught.value).endswith(f"The build log is {log}")
    assert "fatal error: no such header" in log.read_text()
