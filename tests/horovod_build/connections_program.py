"""Rank of a network lab: sums small tensors; rank 0 prints how many connections they used."""

import json
import os
import re
import subprocess

import horovod.tensorflow as hvd
import tensorflow as tf


def sent() -> dict[str, int]:
    """Returns the bytes sent so far on each of this host's connections to host 1."""
    other = os.environ["NETLAB_ADDRESSES"].split(",")[1]
    shown = subprocess.run(
        ["ss", "-tinH", "dst", other], capture_output=True, text=True, check=True
    )
    found = re.findall(r"(\S+:\d+ +\S+:\d+)[^\n]*\n[^\n]*?bytes_sent:(\d+)", shown.stdout)
    return {addresses: int(count) for addresses, count in found}


def add(times: int) -> None:
    """Sums ten numbers over all ranks, one time after the other."""
    for _ in range(times):
        hvd.allreduce(tf.ones([10]), op=hvd.Sum, name="ten numbers")


def main() -> None:
    """Compares the connections before and after some sums."""
    hvd.init()
    # The first time ranks agree in another way: on the tensor's name and shape.
    add(5)
    before = sent()
    add(20)
    after = sent()
    if hvd.rank() == 0:
        used = [addresses for addresses, count in after.items() if count > before[addresses]]
        print(json.dumps({"all": len(after), "used": len(used)}))
    add(1)  # No rank leaves before rank 0 has counted.


main()
