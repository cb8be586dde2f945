"""Rank of `tools.bench.sharding` with PyTorch, in a separate environment.

That environment has neither TensorFlow nor typer, and this module's `--help` works without PyTorch.
"""

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

from tools.bench.compression.model import CLASSES, GLOBAL_BATCH, WARM_UP, WIDTH, Clock
from tools.bench.compression.torch_rank import build
from tools.bench.harness import report, threads_each


def candidate(name: str, ranks: int) -> tuple[Callable[[], None], Any]:
    """Returns a training step, and its optimizer."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = build()
    if name == "PyTorch FSDP2":
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    if name == "PyTorch ZeRO":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-4)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    loss = nn.CrossEntropyLoss()
    x = torch.randn(GLOBAL_BATCH // ranks, WIDTH)
    y = torch.randint(0, CLASSES, (len(x),))

    def step() -> None:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()

    return step, optimizer


def slots_of(optimizer: Any) -> int:
    """Returns the bytes of this rank's slots."""
    optimizer = getattr(optimizer, "optim", optimizer)
    total = 0
    for state in optimizer.state.values():
        for value in state.values():
            local = value.to_local() if hasattr(value, "to_local") else value
            total += local.numel() * local.element_size()
    return total


def main(rounds: int, steps: int) -> None:
    """Times the candidates in turns; rank 0 reports the results."""
    import torch
    import torch.distributed as dist

    rank, ranks = int(os.environ["NETLAB_RANK"]), int(os.environ["NETLAB_RANKS"])
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "eth0")
    torch.set_num_threads(threads_each(ranks))
    dist.init_process_group("gloo", init_method="tcp://host0:29500", rank=rank, world_size=ranks)
    names = ("PyTorch DDP", "PyTorch ZeRO", "PyTorch FSDP2")
    made, rows = {name: candidate(name, ranks) for name in names}, {name: [] for name in names}
    for name in names:
        for _ in range(WARM_UP):
            made[name][0]()
    for _ in range(rounds):
        for name in names:
            clock = Clock()
            clock.start()
            for _ in range(steps):
                made[name][0]()
                clock.tick()
            rows[name] += clock.rows
            print(name, clock.summary(), file=sys.stderr, flush=True)
    results = {}
    for name in names:
        clock = Clock()
        clock.rows = rows[name]
        results[name] = {**clock.summary(), "slots": slots_of(made[name][1])}
    if rank == 0:
        report(results)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rounds", type=int, help="Rounds.")
    parser.add_argument("steps", type=int, help="Steps of a candidate in each round.")
    main(**vars(parser.parse_args()))
