"""Checks `PerformanceMetrics` against NumPy, injected delays and arithmetic, for all strategies."""

import csv
import json

import numpy as np
import pytest

from tests.callbacks import performance_cases as cases
from tfdml.callbacks import PerformanceMetrics
from tfdml.callbacks.performance.hardware import known_peak_flops

TIMES = {
    "samples_per_sec",
    "step_ms",
    *(f"{n}_ms{of}" for n in ("compute", "wait", "data_wait") for of in ("", "_min", "_max")),
    "exchange_ms",
    "slowest_rank",
    "slowest_rank_share",
}
ALWAYS = {"checkpoint_stall_s", "eta_s", "memory_gb", "memory_gb_max"}
NAMES = {*TIMES, *ALWAYS, "grad_norm", "bytes_sent"}
BYTES = 4 * 40 * 30


@pytest.mark.parametrize(
    "kind",
    ["horovod", "multi_worker", pytest.param("mirrored", marks=pytest.mark.slow)],
)
def test_logs_of_all_ranks_and_epochs(ranks, tmp_path, kind):
    """A logger that is given first has them, lines of progress do not, and each rank its own."""
    found = ranks(2, kind).run(cases.logged, str(tmp_path), {})
    first = found[0]["history"]
    assert set(first) == NAMES
    assert all(np.shape(values) == (3,) and np.isfinite(values).all() for values in first.values())
    assert all(rank["history"] == first for rank in found)
    # Also those of `GradientNoiseScale`.
    rows = list(csv.DictReader(found[0]["table"].splitlines()))
    for name, values in first.items():
        assert [float(row[f"perf/{name}"]) for row in rows] == pytest.approx(values)
    assert "loss: " in found[0]["printed"]
    assert "perf/" not in found[0]["printed"]
    assert "gradient_noise_scale: " in found[0]["printed"]
    assert "gradient_noise_scale" in rows[0]
    steps = np.array(first["step_ms"])
    assert np.array(first["samples_per_sec"]) * steps / 1000 == pytest.approx([cases.BATCH] * 3)
    assert first["grad_norm"][0] == pytest.approx(cases.norms(4)[-1], rel=1e-5)
    processes = len(found)
    # A ring all-reduce: each rank sends 2 (N - 1) / N of the gradient.
    sent = 2 * (processes - 1) / processes * BYTES
    assert first["bytes_sent"] == pytest.approx([sent] * 3)
    lines = [[json.loads(line) for line in rank["lines"]] for rank in found]
    for epoch in range(3):
        own = [of_rank[epoch] for of_rank in lines]
        assert [line["epoch"] for line in own] == [epoch] * processes
        assert sum(line["rows"] for line in own) == cases.BATCH * (3 if epoch == 0 else 4)
        assert np.mean([line["compute_ms"] for line in own]) == first["compute_ms"][epoch]
        assert max(line["wait_ms"] for line in own) == first["wait_ms_max"][epoch]


@pytest.mark.parametrize("kind", ["computing", "reading"])
def test_the_slow_rank_is_named(ranks, kind):
    """Rank 1 takes 0.1 s longer; the other waits for it, which the step monitor shows too."""
    delays = (0.1, 0.0) if kind == "computing" else (0.0, 0.1)
    first, second = ranks(2).run(cases.of_slow_rank, *delays)
    logs = first["logs"]
    assert logs == second["logs"]
    slow, fast = ("compute", "data_wait") if kind == "computing" else ("data_wait", "compute")
    for epoch in range(2):
        now = {name: values[epoch] for name, values in logs.items()}
        assert now["slowest_rank"] == 1
        assert now["slowest_rank_share"] > 0.8
        assert now[f"{slow}_ms_max"] > 80
        assert now[f"{slow}_ms_max"] > now[f"{slow}_ms_min"] + 60
        assert now[f"{fast}_ms_max"] < now[f"{slow}_ms_max"]
        assert now["wait_ms_max"] > 60
        assert now["wait_ms_min"] < now["wait_ms_max"] / 2
        assert now["step_ms"] > 80
        of_monitor = np.array(first["shown"][epoch])
        assert of_monitor.mean(0).tolist() == pytest.approx([now["compute_ms"], now["wait_ms"]])
        assert of_monitor[:, 1].max() == pytest.approx(now["wait_ms_max"])
    # The clock is shared: the other observer is that of the gradients.
    assert first["observers"] == 2


@pytest.mark.parametrize(
    ("codec", "ratio"),
    [
        ({"class": "TopK", "ratio": 0.01}, 20),
        # 600 weights for each rank are sent as two blocks of 512.
        pytest.param({"class": "QSGD", "bits": 4, "stochastic": True}, 4.6, marks=pytest.mark.slow),
    ],
    ids=["TopK", "QSGD"],
)
def test_compression(ranks, codec, ratio):
    """The error is that of the residuals that the ranks hold; unbiased codecs keep none."""
    found = ranks(2).run(cases.compressed, codec, 1, 5)
    logs = found[0]["logs"]
    assert found[1]["logs"] == logs
    assert logs["compression_ratio"][0] > ratio
    assert logs["bytes_sent"][0] == pytest.approx(BYTES / logs["compression_ratio"][0])
    left = np.sqrt(sum(rank["squared_residual"] for rank in found))
    if codec["class"] == "TopK":
        assert logs["compression_error"][0] == pytest.approx(left / logs["grad_norm"][0], rel=1e-5)
        assert logs["compression_error"][0] > 0.5
    else:
        assert "compression_error" not in logs
        assert left == 0


def test_overflows(ranks):
    """Overflows on the other rank are counted for all, and halve the scale."""
    first, second = ranks(2).run(cases.of_overflows)
    assert first == second
    assert first["skipped_steps"] == [0, 2, 0]
    assert first["loss_scale"] == [64, 16, 16]
    # Without the loss scale, and not of a step that overflowed.
    assert first["grad_norm"][0] == pytest.approx(cases.norms(4)[-1], rel=1e-5)
    assert np.isfinite(first["grad_norm"]).all()


def test_checkpoints_stall_training(ranks, tmp_path):
    saves = ranks(2).run(cases.with_checkpoints, str(tmp_path), True)
    assert saves[0]["checkpoint_stall_s"] == saves[1]["checkpoint_stall_s"]
    assert min(saves[0]["checkpoint_stall_s"]) > 0
    without = ranks(2).run(cases.with_checkpoints, str(tmp_path), False)
    assert without[0]["checkpoint_stall_s"] == [0, 0]


@pytest.mark.parametrize(
    "kind",
    [
        "accumulation",
        "local updates",
        *(pytest.param(k, marks=pytest.mark.slow) for k in ("sharding", "several steps", "eager")),
    ],
)
def test_steps_of_other_kinds(ranks, kind):
    """Each step computes for 20 ms, whether it exchanges gradients or not."""
    first, second = ranks(2).run(cases.of_options, kind)
    assert first == second
    assert set(first) == NAMES
    for epoch in range(2):
        assert first["compute_ms"][epoch] > 19
        assert first["step_ms"][epoch] > first["compute_ms"][epoch]
        parts = ("compute_ms", "exchange_ms", "wait_ms", "data_wait_ms")
        assert sum(first[part][epoch] for part in parts) < first["step_ms"][epoch] * 1.001
        rows = first["samples_per_sec"][epoch] * first["step_ms"][epoch] / 1000
        assert rows == pytest.approx(cases.BATCH)
    if kind in ("sharding", "several steps", "eager"):
        assert first["grad_norm"][0] == pytest.approx(cases.norms(6)[-1], rel=1e-5)


@pytest.mark.parametrize("ours", [True, False], ids=["tfdml", "plain"])
@pytest.mark.parametrize("jit_compile", [False, True])
def test_one_process(ranks, ours, jit_compile):
    """Also compiled as a whole by XLA, whose code cannot note times; losses stay the same."""
    (found,) = ranks(1).run(cases.of_one_process, jit_compile, ours)
    logs = found["logs"]
    assert set(logs) == NAMES
    assert logs["exchange_ms"] == logs["wait_ms"] == logs["bytes_sent"] == [0, 0]
    assert logs["grad_norm"][0] == pytest.approx(cases.norms(6)[-1], rel=1e-5)
    assert min(logs["compute_ms"]) > 0
    rows = np.array(logs["samples_per_sec"]) * np.array(logs["step_ms"]) / 1000
    assert rows == pytest.approx([cases.BATCH] * 2)
    assert found["losses"] == pytest.approx(found["expected"], rel=1e-6)


@pytest.mark.parametrize("synchronous", [True, False])
def test_servers(cluster, tmp_path, synchronous):
    found = cluster.run(cases.of_servers, synchronous, str(tmp_path))
    logs = found["logs"]
    absent = {"grad_norm", "bytes_sent"}
    if not synchronous:
        absent |= {n for n in NAMES if n.startswith(("exchange_ms", "wait_ms", "data_wait_ms"))}
        absent.add("slowest_rank_share")
    assert set(logs) == NAMES - absent | {"flops_utilization"}
    assert all(np.isfinite(values).all() for values in logs.values())
    flops = 3 * 2 * cases.FEATURES * 30
    used = np.array(logs["samples_per_sec"]) * flops / (2 * 1e6)
    assert np.array(logs["flops_utilization"]) == pytest.approx(used)
    lines = cases.lines_of(str(tmp_path))
    assert {line["file"] for line in lines} == {"chief", "rank_0", "rank_1"}
    workers = [line for line in lines if line["file"] != "chief"]
    second = [line for line in workers if line["epoch"] == 1]
    assert sum(line["rows"] for line in second) == 12 * cases.BATCH
    assert sum(line["steps"] for line in second) == (24 if synchronous else 12)
    compute = [1000 * rank["compute"] for rank in found["shown"]]
    assert compute == pytest.approx([line["compute_ms"] for line in second])
    assert all((rank["wait"] is None) is not synchronous for rank in found["shown"])
    assert found["printed"].count("mean times of a step, in ms") == 2


@pytest.mark.parametrize(
    ("device", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989e12),
        ("NVIDIA H100 PCIe", "float32", 378e12),
        ("NVIDIA H100 NVL", "bfloat16", 835.5e12),
        ("NVIDIA H200", "float32", 494e12),
        ("NVIDIA GH200 480GB", "float32", None),
        ("NVIDIA A100-SXM4-40GB", "float16", 312e12),
        ("Tesla V100-SXM2-16GB", "float32", 15.7e12),
        ("Tesla V100-PCIE-32GB", "float16", 112e12),
        ("Tesla T4", "bfloat16", None),
        ("NVIDIA A10G", "float16", None),
        ("NVIDIA A100-SXM4-40GB", "float64", None),
        ("", "float32", None),
    ],
)
def test_peaks_of_gpus(device, dtype, peak):
    assert known_peak_flops(device, dtype) == peak


@pytest.mark.parametrize(
    "arguments", [{"window": 0}, {"window": 1.5}, {"flops_per_sample": 0}, {"peak_flops": "1e12"}]
)
def test_wrong_arguments(arguments):
    (name,) = arguments
    with pytest.raises(ValueError, match=f"`{name}` must be .* Received: {name}="):
        PerformanceMetrics(**arguments)


def test_utilization_of_ranks_with_different_devices(ranks):
    """The operations are counted; a rank whose peak is unknown leaves the number out on all."""
    first, second = ranks(2).run(cases.utilizations, [3e9, None])
    assert first == second
    flops = 3 * 2 * cases.FEATURES * 30
    expected = first[0]["samples_per_sec"][0] * flops / (1e9 + 3e9)
    assert first[0]["flops_utilization"] == pytest.approx([expected])
    assert "flops_utilization" not in first[1]


@pytest.mark.parametrize(
    ("kind", "products"),
    [
        ("tables", 12 * 8 + 8),
        pytest.param("normalized", cases.FEATURES * 20 + 20 * 30, marks=pytest.mark.slow),
    ],
)
def test_operations_are_counted_once_and_without_lookups(ranks, kind, products):
    counted = ranks(2).run(cases.counted_operations, kind)
    assert counted == pytest.approx([3 * 2 * products] * 2)


def test_utilization_in_plain_keras():
    model = cases.linear()
    x, y = cases.problem(4)
    metrics = PerformanceMetrics(flops_per_sample=2400.0, peak_flops=1e9)
    logs = cases.perf(model.fit(x, y, batch_size=12, verbose=0, callbacks=[metrics]).history)
    expected = logs["samples_per_sec"][0] * 2400 / 1e9
    assert logs["flops_utilization"] == pytest.approx([expected])
