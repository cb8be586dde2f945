"""Checks that wrong arguments and missing packages are reported when a strategy is created."""

import subprocess
import sys

import pytest

from tfdml.compression import QSGD
from tfdml.strategies import HorovodStrategy, MirroredStrategy, MultiWorkerMirroredStrategy
from tfdml.topology import child_environment

LAUNCHED = {
    "HOROVOD_RANK": "1",
    "HOROVOD_SIZE": "2",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
}


@pytest.mark.parametrize("devices", ["CPU:0", []])
def test_devices_must_be_a_list(devices):
    with pytest.raises(ValueError, match="`devices` must be a non-empty list.*Received: devices="):
        HorovodStrategy(devices=devices)


@pytest.mark.parametrize("cls", [HorovodStrategy, MultiWorkerMirroredStrategy, MirroredStrategy])
@pytest.mark.parametrize("compression", ["zip", 4, QSGD])
def test_compression_must_be_a_compressor_or_a_name(cls, compression):
    rule = r"`compression` must be a .*PowerSGD\(rank=4\), one of 'none', 'auto', 'fp16', .* None"
    with pytest.raises(ValueError, match=rule) as error:
        cls(compression=compression)
    assert f"Received: compression={compression!r}" in str(error.value)


@pytest.mark.parametrize("cls", [HorovodStrategy, MultiWorkerMirroredStrategy])
@pytest.mark.parametrize("bucket_bytes", [0, -1, 1.5, "4 MB", None])
def test_bucket_bytes_must_be_a_number_of_bytes(cls, bucket_bytes):
    rule = "`bucket_bytes` must be a positive number of bytes. Received: bucket_bytes="
    with pytest.raises(ValueError, match=rule) as error:
        cls(bucket_bytes=bucket_bytes)
    assert repr(bucket_bytes) in str(error.value)


def _without_horovod(**environment: str) -> subprocess.CompletedProcess:
    code = (
        "import sys; sys.modules['horovod'] = None\n"  # As if not installed.
        "import tfdml; s = tfdml.HorovodStrategy(); print(s.size, s.num_replicas_in_sync)"
    )
    return subprocess.run(
        [sys.executable, "-c", code],
        env=child_environment(**environment),
        capture_output=True,
        text=True,
        timeout=180,
    )


def test_one_process_needs_no_horovod():
    done = _without_horovod()
    assert done.stdout.split() == ["1", "1"], done.stderr


def test_several_processes_without_horovod_get_instructions():
    done = _without_horovod(**LAUNCHED)
    assert done.returncode == 1
    assert "rank 1 of 2, started by horovodrun" in done.stderr
    assert "Run `tfdml build-horovod`" in done.stderr
