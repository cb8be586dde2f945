"""Checks the table of `tfdml bench`, and a run on two ranks."""

import subprocess
import sys

import pytest
from rich.console import Console

from tfdml import compression
from tfdml.cli.bench_rank import model_shapes, table
from tfdml.collectives.hosts import Hosts
from tfdml.compression.auto.cost_model import Link

BENCH = [sys.executable, "-m", "tfdml.cli.main", "bench"]


def test_table_is_sorted_by_predicted_time():
    # 1 MB/s: 2 MB uncompressed, a quarter as int8; the other's codec takes 10 s.
    codecs = [
        (None, 0.0, False),
        (compression.QSGD(8), 1e-9, False),
        (compression.Float16(), 1e-5, False),
    ]
    lines = shown(table(Link(0.0, 1e6), Hosts(((0,), (1,))), [(1024, 512)], codecs))
    lines = [line for line in lines if line.startswith("│")]
    assert [line.split("│")[1].split("(")[0].strip() for line in lines] == [
        "QSGD",
        "none",
        "Float16",
    ]
    assert lines[1].split()[-2] == "1.00"
    assert 3.8 < float(lines[0].split()[-2]) < 4.0


def test_table_of_several_ranks_on_a_host_says_which_way_is_taken():
    codecs = [
        (None, 0.0, False),
        (compression.QSGD(8), 0.0, True),
        (compression.QSGD(4), 0.0, False),
    ]
    made = table(Link(0.0, 1e6, 1e9), Hosts(((0, 1), (2, 3))), [(1024, 512)], codecs)
    lines = shown(made)
    assert "4 ranks of 2 hosts (2+2)" in lines[0]
    rows = {line.split("│")[1].split("(")[0].strip(): line for line in lines if "│" in line}
    assert "by hosts" in next(line for line in lines if "bits=8" in line)
    assert "by hosts" not in next(line for line in lines if "bits=4" in line)
    # 2 MB: the ring carries 3/2 of it; by hosts 8 bit carries 1/4.
    assert float(rows["none"].split("│")[2]) == pytest.approx(1.5 * 2.097, abs=0.01)


def shown(made) -> list[str]:
    """Returns a table's lines."""
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(made)
    return console.export_text().splitlines()


def test_shapes_come_from_a_saved_model(tmp_path):
    import keras

    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(5)])
    model.save(tmp_path / "model.keras")
    assert model_shapes(str(tmp_path / "model.keras")) == [(3, 5), (5,)]


def test_one_rank_is_refused():
    done = subprocess.run([*BENCH, "--hosts", "node1"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "`hosts` must have at least two ranks" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--horovod"]])
def test_measurement_on_two_ranks(options):
    done = subprocess.run([*BENCH, *options], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "A step's exchange on 2 ranks" in done.stdout
    assert "PowerSGD(rank=4" in done.stdout
