"""Checks `tfdml build-horovod --nccl`: finding and linking CUDA and NCCL, and a real build."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.command import ROOT
from tests.horovod_build.test_requirements import assert_one_message
from tfdml.horovod_build import BuildError, BuildOptions, cuda
from tfdml.horovod_build.changes import RPATH_VARIABLE

# Files of the wheels, as far as they are examined.
WHEELS = (
    "cu13/include/crt/host_config.h",
    "cu13/include/cuda_runtime.h",
    "cu13/include/nv/target",
    "cu13/lib/libcudart.so.13",
    "cu13/lib/libcudart_static.a",
    "cu13/nvvm/bin/cicc",
    "nccl/lib/libnccl.so.2",
)
HEADER = "#define NCCL_MAJOR 2\n#define NCCL_MINOR 32\n#define NCCL_PATCH 3\n"


def nvcc(file: Path, version: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release 13.5, V{version}'\n")
    file.chmod(0o755)


def toolkit(home: Path, version: str, libraries: str = "lib64") -> Path:
    """Creates the examined files of an installed CUDA toolkit."""
    nvcc(home / "bin/nvcc", version)
    for name in ("include/cuda_runtime.h", f"{libraries}/libcudart_static.a"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).touch()
    return home


@pytest.fixture
def site(tmp_path, monkeypatch) -> Path:
    """Returns a folder of packages with NVIDIA's wheels, in pip's layout."""
    # This machine may have a toolkit in the usual location.
    monkeypatch.setattr(cuda, "USUAL_HOME", tmp_path / "usual")
    folder = tmp_path / "site-packages"
    for name in WHEELS:
        file = folder / "nvidia" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    nvcc(folder / "nvidia/cu13/bin/nvcc", "13.5.37")
    (folder / "nvidia/nccl/include").mkdir()
    (folder / "nvidia/nccl/include/nccl.h").write_text(HEADER)
    return folder


def test_wheels_are_found_and_change_the_key_of_the_cache(site):
    found = cuda.find({"PATH": ""}, site)
    assert found.cuda == site / "nvidia/cu13"
    assert found.facts() == {"cuda": "13.5.37", "nccl": "2.32.3 (wheel)"}


def test_build_gets_links_with_the_names_linkers_expect(site, tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    variables = cuda.find({"PATH": ""}, site).variables(scratch, "/bin")
    home, nccl = Path(variables["HOROVOD_CUDA_HOME"]), Path(variables["HOROVOD_NCCL_HOME"])
    assert {home.parent, nccl.parent} == {scratch}
    for link, file in {
        home / "bin/nvcc": "cu13/bin/nvcc",
        home / "include/cuda_runtime.h": "cu13/include/cuda_runtime.h",
        home / "lib64/libcudart_static.a": "cu13/lib/libcudart_static.a",
        home / "lib/libcudart.so": "cu13/lib/libcudart.so.13",
        home / "nvvm/bin/cicc": "cu13/nvvm/bin/cicc",
        nccl / "include/nccl.h": "nccl/include/nccl.h",
        nccl / "lib/libnccl.so": "nccl/lib/libnccl.so.2",
        nccl / "lib/libnccl.so.2": "nccl/lib/libnccl.so.2",
    }.items():
        assert link.resolve() == (site / "nvidia" / file).resolve()
    # The first `nvcc` on PATH is asked for the GPUs to compile for.
    assert variables["PATH"] == f"{home}/bin:/bin"
    # From Horovod's library to NCCL's, in the same folder of packages.
    library = site / "horovod" / "tensorflow"
    library.mkdir(parents=True)
    rpath = variables[RPATH_VARIABLE].replace("$ORIGIN", str(library))
    assert (Path(rpath) / "libnccl.so.2").exists()


def test_paths_named_by_the_user_come_first_unchanged(site, tmp_path):
    chosen = toolkit(tmp_path / "chosen", "12.5.82", "lib/x86_64-linux-gnu")
    (chosen / "include/nccl.h").write_text(HEADER.replace("32", "22"))
    (chosen / "lib").mkdir(exist_ok=True)
    (chosen / "lib/libnccl_static.a").touch()
    usual = toolkit(tmp_path / "cuda_home", "12.0.1")
    environment = {"PATH": "", "CUDA_HOME": str(usual)}
    assert cuda.find(environment, site).cuda_version == "12.0.1"
    environment |= {"HOROVOD_CUDA_HOME": str(chosen), "HOROVOD_NCCL_HOME": str(chosen)}
    found = cuda.find(environment, site)
    assert found.facts() == {"cuda": "12.5.82", "nccl": f"2.22.3 ({chosen})"}
    assert found.variables(tmp_path, "/bin") == {
        "HOROVOD_CUDA_HOME": str(chosen),
        "HOROVOD_NCCL_HOME": str(chosen),
        "PATH": f"{chosen}/bin:/bin",
    }


def test_a_toolkit_on_path_and_in_the_usual_place(site, tmp_path):
    (site / "nvidia/cu13/bin/nvcc").unlink()
    toolkit(tmp_path / "usual", "11.8.0")
    assert cuda.find({"PATH": "/nowhere"}, site).cuda_version == "11.8.0"
    on_path = toolkit(tmp_path / "on_path", "12.4.1")
    assert cuda.find({"PATH": f"{on_path}/bin"}, site).cuda_version == "12.4.1"


@pytest.mark.parametrize(
    ("name", "wheel"),
    [
        ("bin/nvcc", "nvidia-cuda-nvcc"),
        ("include/nv/target", "nvidia-cuda-cccl"),
        ("include/crt/host_config.h", "nvidia-cuda-crt"),
        ("lib/libcudart_static.a", "nvidia-cuda-runtime"),
        ("nvvm/bin/cicc", "nvidia-nvvm"),
    ],
)
def test_a_missing_part_is_named_with_its_wheel(site, name, wheel):
    (site / "nvidia/cu13" / name).unlink()
    with pytest.raises(BuildError) as raised:
        cuda.find({"PATH": ""}, site)
    message = str(raised.value)
    assert f"cu13 without {name} ({wheel})" in message
    assert 'pip install "nvidia-cuda-nvcc==13.*" "nvidia-cuda-cccl==13.*"' in message


def test_choices_of_the_user_are_not_replaced(site, tmp_path):
    """The wheels are installed and would suffice."""
    with pytest.raises(BuildError, match="HOROVOD_CUDA_HOME: .*chosen without bin/nvcc"):
        cuda.find({"PATH": "", "HOROVOD_CUDA_HOME": str(tmp_path / "chosen")}, site)
    with pytest.raises(BuildError, match="not both in .*chosen. Install it: pip install nvidia-nc"):
        cuda.find({"PATH": "", "HOROVOD_NCCL_HOME": str(tmp_path / "chosen")}, site)


def test_no_nccl_library(site):
    (site / "nvidia/nccl/lib/libnccl.so.2").unlink()
    with pytest.raises(BuildError, match="HOROVOD_NCCL_HOME to its folder"):
        cuda.find({"PATH": "", "HOROVOD_NCCL_HOME": str(site / "nvidia/nccl")}, site)


def test_a_compiler_that_does_not_run(site):
    (site / "nvidia/cu13/bin/nvcc").write_text("#!/bin/sh\necho 'no such GPU' >&2\n")
    with pytest.raises(BuildError, match="compiler must report its version. Received: ''"):
        cuda.find({"PATH": ""}, site)


def test_the_command_says_so_before_anything_is_fetched(tfdml_command, tmp_path):
    done = tfdml_command(
        *("build-horovod", "--nccl", "--wheel-dir", str(tmp_path / "wheels")),
        HOROVOD_CUDA_HOME=str(tmp_path / "none"),
        XDG_CACHE_HOME=str(tmp_path / "cache"),
    )
    assert_one_message(done, "CUDA's compiler nvcc", "bin/nvcc", "set HOROVOD_CUDA_HOME")
    assert not (tmp_path / "cache").exists()


def test_other_builds_do_not_look_for_it():
    assert BuildOptions().label == "gloo"
    assert "HOROVOD_GPU_OPERATIONS" not in BuildOptions().variables()
    assert BuildOptions(nccl=True).variables()["HOROVOD_GPU_OPERATIONS"] == "NCCL"


# A CUDA build of TensorFlow, and the wheels needed by a build with NCCL.
PACKAGES = (
    "tensorflow==2.21.*",
    "nvidia-nccl-cu12",
    *(f"nvidia-cuda-{name}==13.*" for name in ("nvcc", "cccl", "crt", "runtime")),
    "nvidia-nvvm==13.*",
)
PROGRAM = """
import json
import horovod.tensorflow as hvd
import tensorflow as tf

hvd.init()
total = hvd.allreduce(tf.range(4.0) * (hvd.rank() + 1), op=hvd.Sum).numpy().tolist()
if hvd.rank() == 0:
    built = bool(hvd.nccl_built()), bool(hvd.cuda_built()), bool(hvd.gloo_built())
    print("RESULT", json.dumps([built, hvd.size(), total]), flush=True)
"""


@pytest.mark.slow  # A gigabyte of wheels, and a build of several minutes.
def test_a_build_from_wheels_loads_without_a_gpu_and_sums_by_gloo(environment_without, tmp_path):
    python = environment_without("tensorflow", "horovod", "nvidia")
    packages = [python, "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*packages, *PACKAGES], check=True, timeout=1200)
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "XDG_CACHE_HOME": str(tmp_path)}
    for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "HOROVOD_NCCL_HOME"):
        environment.pop(name, None)

    def run(*command: str, timeout: float) -> str:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    built = run(python, "-m", "tfdml.cli.main", "build-horovod", "--nccl", timeout=2400)
    assert "Installed, and it loads (gloo, nccl)." in built
    horovodrun = Path(sys.executable).with_name("horovodrun")
    output = run(
        *(python, str(horovodrun), "-np", "2", python, "-c", PROGRAM),
        timeout=300,
    )
    result = json.loads(output.split("RESULT ", 1)[1].splitlines()[0])
    assert result == [[True, True, True], 2, [0.0, 3.0, 6.0, 9.0]]
