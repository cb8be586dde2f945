"""Checks `tools/gpu_report`: its results on CPUs, causes of failed rows, and the page."""

import math
import os
import re
import subprocess
from pathlib import Path

import pytest
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from tests.harness.command import run_python
from tests.tools.checkouts import ROOT
from tools.gpu_checks import basics, codecs, prefetch, speed, trace, training
from tools.gpu_checks.checks import CHECKS, Check, rows_of
from tools.gpu_checks.machine import Machine
from tools.gpu_checks.page import ON_PROCESSORS, page
from tools.gpu_checks.row import Row

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def gpu_report(*arguments: str, timeout: float = 300, **variables: str):
    """Runs the command in this environment: `tools/gpu_report` without `tools/bootstrap`."""
    return run_python("-m", "tools.gpu_checks", *arguments, timeout=timeout, **variables)


def lines_of(text: str) -> dict[str, tuple[str, str, str]]:
    """Returns the rows of a page by name: the rule, the result and the figures."""
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    cells = [re.split(r" ?(?<!\\)\| ?", row)[1:-1] for row in rows]
    return {name: (rule, result, figures) for name, rule, result, figures in cells}


def processors() -> Machine:
    return Machine("cpu", {"devices": []})


# -- The command -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_some_checks_on_processors(tmp_path):
    file = tmp_path / "page.md"
    asked = ("--devices", "cpu", "--only", "devices", "--only", "prefetch")
    done = gpu_report(*asked, "--output", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    text = file.read_text()
    assert text.startswith(f"# {ON_PROCESSORS}\n\n    tools/gpu_report --devices cpu")
    lines = lines_of(text)
    assert set(lines) == {"device CPU:0", "prefetch to the devices"}
    assert {result for _, result, _ in lines.values()} == {"pass"}
    assert "2 passed, 0 failed, 0 not here. With tensorflow" in text
    assert "What fails" not in text
    assert "prefetch: 1 passed, 0 failed" in done.stderr


@pytest.mark.slow
def test_failed_row_sets_exit_code_1():
    """GPUs are requested, and none is found."""
    asked = ("--devices", "gpu", "--only", "devices", "--only", "codecs")
    done = gpu_report(*asked, CUDA_VISIBLE_DEVICES="-1")
    assert done.returncode == 1, done.stdout + done.stderr
    lines = lines_of(done.stdout)
    assert lines["devices"][1] == "FAIL"
    assert lines["codecs"][1] == "not applicable: needs a GPU"
    assert "# Run on GPUs: there is none" in done.stdout
    assert "## What fails\n\n- **devices**: TensorFlow sees none" in done.stdout


def test_help_names_each_check():
    help_text = gpu_report("--help", COLUMNS="200").stdout
    for check in CHECKS:
        assert f"{check.name}: {check.about}" in " ".join(help_text.split())


def test_a_check_that_does_not_exist():
    done = gpu_report("--only", "nothing", COLUMNS="200")
    assert done.returncode == 2
    assert "must be one of versions, devices" in done.stderr
    assert "Received: nothing" in done.stderr


@pytest.mark.slow  # Four minutes on two cores.
def test_the_whole_report_on_processors(tmp_path):
    file = tmp_path / "page.md"
    done = subprocess.run(
        [ROOT / "tools" / "gpu_report", "--devices", "cpu", "--output", file],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=3600,
    )
    text = file.read_text() if file.exists() else ""
    assert done.returncode == 0, done.stdout + done.stderr + text
    lines = lines_of(text)
    needs_a_gpu = {name for name, (_, result, _) in lines.items() if "needs a GPU" in result}
    assert needs_a_gpu == {
        "copies in the profile",
        *(f"{s}Strategy, NCCL" for s in ("Mirrored", "MultiWorkerMirrored", "Horovod")),
    }
    assert {lines[name][1] for name in set(lines) - needs_a_gpu} == {"pass"}
    for variant in training.TOLERANCES:
        assert sum(name.endswith(f": {variant}") for name in lines) == 3
    assert sum(name.startswith("codec ") for name in lines) == 13
    for of in ("memory", "scaling"):
        assert sum(name.startswith(f"{of}: ") for name in lines) == 3


# -- What makes a line fail ------------------------------------------------------------------------


def trained(**changes) -> dict:
    """Returns a job's report on a training."""
    result = {"before": [0.0, 0.0], "weights": [1.0, 2.0], "losses": [0.5], "scales": []}
    return {**result, **changes}


@pytest.mark.parametrize("variant", training.TOLERANCES)
def test_weights_that_differ_from_one_device_fail(variant):
    expected = {name: trained() for name in training.TOLERANCES}
    tolerance = training.TOLERANCES[variant]

    def result(**changes) -> str:
        return training.row_of("n", variant, trained(**changes), expected).result

    assert result() == "pass"
    assert result(weights=[1.0, 2.0 + tolerance / 2]) == "pass"
    assert result(weights=[1.0, 2.0 + tolerance * 2]) == "FAIL"
    assert result(losses=[0.5 + tolerance * 2]) == "FAIL"
    assert result(weights=[1.0, math.nan]) == "FAIL"
    assert result(weights=[1.0]) == "FAIL"


def test_unchanged_weights_fail():
    still = trained(weights=[0.0, 1e-5])
    row = training.row_of("n", "float32", still, {"float32": still})
    assert row.problems == ["weights must move, not by 1e-05 only"]


def test_different_loss_scale_fails():
    expected = {"mixed_float16": trained(scales=[512.0, 64.0])}
    row = training.row_of("n", "mixed_float16", trained(scales=[1024.0, 64.0]), expected)
    assert row.problems == ["loss scales must be [512.0, 64.0], not [1024.0, 64.0]"]


def test_xla_is_compared_with_an_uncompiled_step():
    references = {"float32": trained(), "XLA": trained(weights=[5.0, 5.0])}
    assert training.row_of("n", "XLA", trained(), references).result == "pass"


CODEC = {
    "name": "QSGD(bits=8, bucket_size=512, norm='max', stochastic=True)",
    "error": 0.5,
    "on a processor": 0.5,
    "on": "/job:localhost/replica:0/task:0/device:GPU:0",
    "seconds": 0.1,
    "events": 3,
    "copies": [4, 8],
}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"error": 0.52}, "what is left out must be within"),
        ({"error": math.nan}, "what is left out must be within"),
        ({"events": 0}, "the profile must have events"),
        ({"on": "/device:CPU:0"}, "must be on the GPU, not on CPU:0"),
        ({"copies": [4, 4096, 4097]}, "must be small, not [4097] bytes"),
    ],
)
def test_wrong_codec_or_host_copy_fails(changes, problem):
    row = codecs.row_of({**CODEC, **changes}, 10**9, "gpu")
    assert row.name == "codec QSGD(bits=8, stochastic)"
    assert row.figures["GB/s"] == "10.00"
    assert [problem in message for message in row.problems] == ([True] if problem else [])


def test_missing_control_copy_fails():
    assert codecs.control([100], 100, "gpu").result == "pass"
    assert codecs.control([99], 100, "gpu").result == "FAIL"
    assert codecs.control([], 100, "gpu").result == "FAIL"
    assert codecs.control(None, 100, "cpu").result == "not applicable"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"parts": [["/device:GPU:0", "/device:GPU:0"]]}, "batch 0 must be on"),
        ({"parts": []}, "there must be batches"),
        ({"ahead": 0}, "must come before it is asked for"),
        ({"fit copies ahead": False}, "`fit` must copy ahead"),
    ],
)
def test_late_or_misplaced_rows_fail(changes, problem):
    parts = [["/device:GPU:0", "/device:GPU:1"]]
    reported = {"devices": ["GPU:0", "GPU:1"], "parts": parts, "ahead": 2, "fit copies ahead": True}
    row = prefetch.row_of({**reported, **changes}, "gpu")
    assert [problem in message for message in row.problems] == ([True] if problem else [])


def test_more_memory_than_stock_fails():
    def result(peak: float, weights: tuple[float, ...] = (1.0,), before: float = 0.0) -> str:
        ours = {"peak": peak, "before": [before], "weights": list(weights)}
        return speed.memory_row("n", "p", ours, {"peak": 100, "weights": [1.0]}, "gpu").result

    assert result(125) == "pass"
    assert result(126) == "FAIL"
    assert result(0) == "FAIL"
    assert result(100, (1.001,)) == "FAIL"
    assert result(100, before=1.0) == "FAIL"


def test_weights_decide_and_speed_does_not():
    one = {"images": 100.0, "before": [0.0], "weights": [1.0]}

    def result(ours: dict, stock: dict) -> str:
        return speed.scaling_row("n", "p", one, {**one, **ours}, {**one, **stock}).result

    assert result({"images": 1.0}, {"images": 900.0}) == "pass"
    assert result({"weights": [1.1]}, {"weights": [1.1]}) == "FAIL"
    assert result({}, {"weights": [1.1]}) == "FAIL"
    assert result({"images": math.inf}, {}) == "FAIL"
    assert result({"before": [1.0]}, {}) == "FAIL"


def test_wrong_device_or_product_fails():
    device = {"name": "GPU:0", "kind": "", "capability": "9.0", "on": "x/device:GPU:0"}

    def results(**changes) -> list[str]:
        look = {"devices": [{**device, "error": 1e-5, **changes}]}
        return [row.result for row in basics.devices(Machine("gpu", look))]

    assert results() == ["pass"]
    assert results(error=0.03) == ["FAIL"]  # Typical for TF32.
    assert results(error=math.nan) == ["FAIL"]
    assert results(on="x/device:CPU:0") == ["FAIL"]


def test_a_job_that_ends_early_fails_its_line_alone():
    def rows(machine: Machine):
        yield Row("before", "It runs.")
        machine.alone("look", "--no-such-option")

    found = rows_of(Check("crash", rows, "It ends."), processors())
    assert [(row.name, row.result) for row in found] == [("before", "pass"), ("crash", "FAIL")]
    assert "No such option" in found[1].problems[0]


def test_a_job_that_hangs_fails_its_line_alone():
    def rows(machine: Machine):
        yield from ()
        subprocess.run(["sleep", "60"], timeout=0.1)

    (row,) = rows_of(Check("hang", rows, "It ends."), processors())
    assert row.problems == ["a job must end within 0 s: sleep 60"]


def test_page_escapes_column_separators():
    text = page([Row("a|b", "r", {"f": "1"}, ["p|q"])], processors(), ["tools/gpu_report"])
    assert r"| a\|b | r | FAIL | f: 1 |" in text
    assert "- **a|b**: p|q" in text


# -- What a profile says ---------------------------------------------------------------------------


def test_a_profile_of_a_processor(tmp_path):
    x = tf.ones([64, 64])
    tf.profiler.experimental.start(str(tmp_path))
    tf.linalg.matmul(x, x).numpy()
    tf.profiler.experimental.stop()
    space = trace.read(tmp_path)
    assert any("MatMul" in name for name, _ in trace.events(space, "/host:CPU"))
    assert list(trace.events(space, trace.GPU_PLANE)) == []
    with pytest.raises(ValueError, match="must have a plane of a GPU. Received: .*/host:CPU"):
        trace.host_copies(space)
    with pytest.raises(ValueError, match="must hold one profile. Received: 0"):
        trace.read(tmp_path / "elsewhere")


def gpu_plane(*copies: tuple[str, str]) -> xplane_pb2.XSpace:
    """Returns a profile with copies, in the format of TensorFlow's CUPTI collector."""
    space = xplane_pb2.XSpace()
    space.planes.add(name="/host:CPU")
    plane = space.planes.add(name="/device:GPU:0")
    plane.stat_metadata[1].name = "memcpy_details"
    line = plane.lines.add(name="Stream #1")
    for number, (name, details) in enumerate(copies, 2):
        plane.event_metadata[number].name = name
        plane.stat_metadata[number].name = details
        event = line.events.add(metadata_id=number)
        event.stats.add(metadata_id=1, ref_value=number)
    return space


def test_copies_between_a_gpu_and_the_host():
    space = gpu_plane(
        ("MemcpyH2D", "kind_src:pinned kind_dst:device size:4194304 dest:0 async:1"),
        ("MemcpyD2D", "kind_src:device kind_dst:device size:999 dest:0 async:1"),
        ("MemcpyD2H", "kind_src:device kind_dst:pageable size:12 dest:0 async:1"),
        ("fusion", ""),
    )
    assert trace.host_copies(space) == [
        trace.Copy("host to device", 4194304),
        trace.Copy("device to host", 12),
    ]


def test_a_copy_without_a_size():
    with pytest.raises(ValueError, match="must tell its size. Received: MemcpyD2H"):
        trace.host_copies(gpu_plane(("MemcpyD2H", "kind_src:device")))


# -- What the pages say ----------------------------------------------------------------------------


def test_pages_say_not_run_on_several_gpus_until_there_is_a_report():
    report_exists = (ROOT / "tools" / "benchmarks" / "gpu_report.md").exists()
    marked_pages = []
    for file in PAGES:
        text = " ".join(file.read_text(encoding="utf-8").split())
        assert not re.search(r"GPU[^.|]*\buntested|\b[Nn]ot tested[^.|]*\bGPU", text), file
        assert "not run on a gpu" not in text.lower(), file
        for found in re.finditer(r"(?i)not run on several GPUs", text):
            marked_pages.append(file.name)
            assert "`tools/gpu_report`" in text[found.start() : found.end() + 120], file
    assert bool(marked_pages) != report_exists, marked_pages


def test_command_exists():
    command = Path(ROOT / "tools" / "gpu_report")
    assert os.access(command, os.X_OK)
