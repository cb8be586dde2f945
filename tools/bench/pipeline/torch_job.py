"""Candidates of `tools.bench.pipeline` in PyTorch: `torch.distributed.pipelining` on gloo.

Each of the two processes has a stage. The environment has neither TensorFlow nor typer.
"""

import argparse
import os
import socket
from collections.abc import Callable
from typing import Any

from tools.bench.harness import report
from tools.bench.pipeline import turns
from tools.bench.pipeline.sizes import HEADS, MICROBATCHES, RATE, WORDS, Sizes, sizes_of
from tools.bench.pipeline.turns import Candidate, Made

ONE_CORE, BOTH, WHOLE = "one core", "two jobs at once", "one core, whole batch"
SCHEDULES = ("Schedule1F1B", "ScheduleGPipe")
# The one-core run with which each is compared.
BASES = {name: ONE_CORE for name in (ONE_CORE, *SCHEDULES, BOTH, WHOLE)}


def names(model: str) -> list[str]:
    """Returns the names of the candidates for a model, in order."""
    if model == "activations":
        return [ONE_CORE, *SCHEDULES]
    return [ONE_CORE, *SCHEDULES, BOTH, WHOLE]


def build(sizes: Sizes) -> tuple[Any, Any]:
    """Returns the two halves of the model."""
    import torch
    from torch import nn

    class Block(nn.TransformerEncoderLayer):
        def __init__(self):
            super().__init__(
                sizes.width, HEADS, 4 * sizes.width, dropout=0.0, activation="gelu",
                batch_first=True, norm_first=True,
            )  # fmt: skip
            mask = nn.Transformer.generate_square_subsequent_mask(sizes.length)
            self.register_buffer("mask", mask, persistent=False)

        def forward(self, x):
            return super().forward(x, src_mask=self.mask, is_causal=True)

    torch.manual_seed(0)
    if not sizes.length:
        made = [
            nn.Sequential(nn.Linear(sizes.width, sizes.width), nn.ReLU())
            for _ in range(sizes.blocks)
        ]
        half = sizes.blocks // 2
        return nn.Sequential(*made[:half]), nn.Sequential(*made[half:])
    blocks = [Block() for _ in range(sizes.blocks)]
    half = sizes.blocks // 2
    head = [nn.LayerNorm(sizes.width), nn.Linear(sizes.width, WORDS)]
    embedding = nn.Embedding(WORDS, sizes.width)
    return nn.Sequential(embedding, *blocks[:half]), nn.Sequential(*blocks[half:], *head)


def make(rank: int, model: str, tiny: bool, port: int) -> Made:
    """Returns the candidates in which a process takes part.

    Args:
        rank: Number of the process.
        model: Name of the model.
        tiny: Whether it is tiny.
        port: Port at which the processes meet.
    """
    turns.pin((rank,))
    import torch
    import torch.distributed as dist
    from torch import nn

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    sizes = sizes_of(model, tiny)
    if sizes.length:
        tokens = torch.randint(0, WORDS, (sizes.rows, sizes.length + 1))
        x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    else:
        x, y = torch.randn(sizes.rows, sizes.width), torch.randn(sizes.rows, sizes.width)

    def loss_of(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if sizes.length:
            return nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())
        return nn.functional.mse_loss(outputs, labels)

    def alone(parts: int) -> Candidate:
        whole = nn.Sequential(*build(sizes))
        if (count := sum(p.numel() for p in whole.parameters())) != sizes.parameters:
            raise RuntimeError(
                f"The model must have {sizes.parameters} parameters, as in the other libraries. "
                f"Received: {count}."
            )

        def gradients() -> None:
            for rows, labels in zip(x.chunk(parts), y.chunk(parts), strict=True):
                (loss_of(whole(rows), labels) / parts).backward()

        return Candidate(_steps(gradients, whole), (rank,))

    def pipelined(schedule: str) -> Candidate:
        from torch.distributed import pipelining

        half = build(sizes)[rank]
        stage = pipelining.PipelineStage(half, rank, 2, torch.device("cpu"))
        scheduled = getattr(pipelining, schedule)(stage, MICROBATCHES, loss_fn=loss_of)

        def gradients() -> None:
            if rank == 0:
                scheduled.step(x)
            else:
                scheduled.step(target=y, losses=[], return_outputs=False)

        return Candidate(_steps(gradients, half), (rank,))

    made = {name: pipelined(name) for name in SCHEDULES}
    own = alone(MICROBATCHES)
    if model != "activations":
        made[BOTH] = own
    if rank == 0:
        made[ONE_CORE] = own
        if model != "activations":
            made[WHOLE] = alone(1)
    return made


def _steps(gradients: Callable[[], None], module: Any) -> Callable[[int], list[float]]:
    import torch

    optimizer = torch.optim.Adam(module.parameters(), RATE)

    def step() -> None:
        gradients()
        optimizer.step()
        # Between steps there are no gradients, as in TensorFlow.
        optimizer.zero_grad(set_to_none=True)

    return lambda steps: turns.timed(step, steps)


def main(model: str, steps: int, rounds: int, tiny: bool) -> None:
    """Measures a model's candidates, and reports the results."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    report(turns.measure(make, names(model), steps, rounds, model, tiny, port))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help='"mlp", "transformer" or "activations".')
    parser.add_argument("--steps", type=int, default=3, help="Steps of a turn.")
    parser.add_argument("--rounds", type=int, default=3, help="Turns of each candidate.")
    parser.add_argument("--tiny", action="store_true", help="Tiny sizes.")
    main(**vars(parser.parse_args()))
