"""Checks the cache of wheels: what its key depends on, and that its wheels are complete."""

import dataclasses
import threading

import pytest
from filelock import FileLock

from tfdml.horovod_build import BuildOptions, build, changes, plan
from tfdml.horovod_build.cache import WheelCache, wheel_facts
from tfdml.horovod_build.requirements import TensorFlow

TF = TensorFlow("tensorflow-cpu", "2.21.0")


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
    path.write_bytes(b"wheel" * 1000)
    return path


def facts(options=None, tensorflow=TF, horovod="0.28.1", **environment):
    return wheel_facts(horovod, tensorflow, options or BuildOptions(), environment)


CHANGES = {
    "mpi": facts(BuildOptions(mpi=True)),
    "nccl": facts(BuildOptions(nccl=True)),
    "no gloo": facts(BuildOptions(gloo=False, mpi=True)),
    "tensorflow": facts(tensorflow=dataclasses.replace(TF, version="2.20.0")),
    "distribution": facts(tensorflow=dataclasses.replace(TF, distribution="tensorflow")),
    "horovod": facts(horovod="0.28.2"),
    "cuda": facts(HOROVOD_CUDA_HOME="/opt/cuda"),
    "compiler": facts(CXX="clang++"),
}


def test_every_change_has_its_own_key(tmp_path):
    cache = WheelCache(tmp_path)
    entries = {cache.entry(f) for f in [facts(), *CHANGES.values()]}
    assert len(entries) == len(CHANGES) + 1


def test_every_change_to_the_source_has_its_own_key(monkeypatch, tmp_path):
    cache = WheelCache(tmp_path)
    before = cache.entry(facts())
    file, (first, *others) = next(iter(changes.CHANGES.items()))
    with monkeypatch.context() as patched:
        patched.setitem(changes.CHANGES, file, (first, *others, ("one", "other")))
        assert cache.entry(facts()) != before
    (tmp_path / "direct_allreduce.cc").write_text("// Another one.\n")
    own = changes.added_file
    monkeypatch.setattr(
        changes,
        "added_file",
        lambda name: tmp_path / name if name == "direct_allreduce.cc" else own(name),
    )
    assert cache.entry(facts()) != before


def test_key_ignores_what_does_not_matter(tmp_path):
    cache = WheelCache(tmp_path)
    assert cache.entry(facts(HOROVOD_RANK="1", HOME="/x")) == cache.entry(facts())


def test_stray_variables_do_not_reach_the_build():
    stray = {"HOROVOD_WITH_PYTORCH": "1", "HOROVOD_NCCL_HOME": "/opt/nccl", "PATH": "/bin"}
    environment = BuildOptions().environment(stray)
    assert "HOROVOD_WITH_PYTORCH" not in environment
    assert environment["HOROVOD_NCCL_HOME"] == "/opt/nccl"
    assert environment["HOROVOD_WITH_GLOO"] == environment["HOROVOD_WITHOUT_MPI"] == "1"
    assert "HOROVOD_GPU_OPERATIONS" not in environment
    assert BuildOptions(nccl=True).environment(stray)["HOROVOD_GPU_OPERATIONS"] == "NCCL"


def test_added_wheel_is_found(tmp_path, wheel):
    cache = WheelCache(tmp_path / "cache")
    assert cache.find(facts()) is None
    added = cache.add(wheel, facts())
    assert cache.find(facts()) == added
    assert added.read_bytes() == wheel.read_bytes()
    assert cache.find(CHANGES["nccl"]) is None


def test_damaged_wheel_is_not_found_and_is_replaced(tmp_path, wheel):
    cache = WheelCache(tmp_path / "cache")
    added = cache.add(wheel, facts())
    added.write_bytes(wheel.read_bytes()[:-1])
    assert cache.find(facts()) is None
    assert cache.add(wheel, facts()) == added
    assert cache.find(facts()) == added
    assert [p.name for p in cache.root.iterdir()] == [added.parent.name]


def test_cache_hit_skips_the_build_and_rebuild_does_not(tfdml_command, tmp_path, wheel):
    planned = plan(BuildOptions(), tmp_path / "cache")
    added = planned.wheels.add(wheel, planned.facts)
    # Without commands on PATH a build cannot even begin.
    options = ["build-horovod", "--only-wheel", "--wheel-dir", str(tmp_path / "cache")]
    hit = tfdml_command(*options, PATH="/nonexistent")
    assert hit.returncode == 0, hit.stderr
    assert f"from the cache: {added}" in hit.stdout
    for other in (["--rebuild"], ["--mpi"]):
        miss = tfdml_command(*options, *other, PATH="/nonexistent", XDG_CACHE_HOME=str(tmp_path))
        assert miss.returncode == 1
        assert "C++ compiler" in miss.stderr


def test_second_build_waits_and_uses_the_first_ones_wheel(tmp_path, wheel, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    planned = plan(BuildOptions(), tmp_path / "cache")
    planned.wheels.root.mkdir()
    entry = planned.wheels.entry(planned.facts)
    waiting, lines, built = threading.Event(), [], []

    def report(line: str) -> None:
        lines.append(line)
        waiting.set()

    second = threading.Thread(target=lambda: built.append(build(planned, jobs=1, report=report)))
    with FileLock(str(entry.with_name(f".{entry.name}.lock"))):
        second.start()
        assert waiting.wait(timeout=10)
        planned.wheels.add(wheel, planned.facts)
    second.join(timeout=30)
    assert "waiting" in lines[0]
    assert built[0].from_cache
    assert built[0].wheel.parent == entry
