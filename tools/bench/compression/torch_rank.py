"""Rank of `tools.bench.compression` with PyTorch, in a separate environment.

That environment has neither TensorFlow nor typer, and this module's `--help` works without PyTorch.
"""

import argparse
import os
import sys
from typing import Any

from tools.bench.compression.model import CLASSES, GLOBAL_BATCH, LAYERS, WIDTH, steps_of, timed
from tools.bench.harness import report, threads_each

WARM_UP = 2
# PowerSGD sends its first steps uncompressed; it requires at least two.
FIRST_COMPRESSED = 2


def build() -> Any:
    """Returns the same model as the TensorFlow ranks."""
    from torch import nn

    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


def measure(name: str, hosts: int, rate: float) -> dict[str, float]:
    """Times steps of DDP with or without a hook; without any exchange for "local"."""
    import torch
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = build()
    trained, warm_up = model, WARM_UP
    if name != "PyTorch local":
        # With several buckets, the PowerSGD hook exchanges parts in an order that differs between
        # ranks, and gloo fails.
        whole = 1024 if name.endswith("PowerSGD hook") else None
        trained = DistributedDataParallel(model, bucket_cap_mb=whole)
        if name.endswith("fp16 hook"):
            trained.register_comm_hook(None, default_hooks.fp16_compress_hook)
        if name.endswith("PowerSGD hook"):
            state = powerSGD_hook.PowerSGDState(
                process_group=None,
                matrix_approximation_rank=4,
                start_powerSGD_iter=FIRST_COMPRESSED,
            )
            trained.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
            warm_up = FIRST_COMPRESSED + 1
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    loss = nn.CrossEntropyLoss()
    x = torch.randn(GLOBAL_BATCH // hosts, WIDTH)
    y = torch.randint(0, CLASSES, (len(x),))

    def step() -> None:
        optimizer.zero_grad()
        loss(trained(x), y).backward()
        optimizer.step()

    sends = name if name != "PyTorch local" else "PyTorch DDP PowerSGD hook"
    return timed(step, steps_of(sends, hosts, rate), warm_up)


def main(names: str, rate: float) -> None:
    """Times candidates, separated by semicolons; rank 0 reports the results."""
    import torch
    import torch.distributed as dist

    rank, hosts = int(os.environ["NETLAB_RANK"]), int(os.environ["NETLAB_RANKS"])
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "eth0")
    torch.set_num_threads(threads_each(hosts))
    dist.init_process_group("gloo", init_method="tcp://host0:29500", rank=rank, world_size=hosts)
    results = {}
    for name in names.split(";"):
        dist.barrier()
        results[name] = measure(name, hosts, rate)
        print(name, results[name], file=sys.stderr, flush=True)
    results["versions"] = {"torch": torch.__version__}
    if rank == 0:
        report(results)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", help="Candidates, separated by semicolons.")
    parser.add_argument("rate", type=float, help="Of the network, in bits per second.")
    main(**vars(parser.parse_args()))
