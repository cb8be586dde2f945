"""Candidate of `tools.bench.remat` in PyTorch, in an environment without TensorFlow."""

import argparse

from tools.bench.harness import report
from tools.bench.remat.model import BLOCKS, DROPOUT, INNER, RATE, ROWS, STEPS, WIDTH, measured


def main(way: str) -> None:
    """Measures one way of checkpointing, and reports it.

    Args:
        way: "none" or "torch.utils.checkpoint" of each block.
    """
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(1)
    blocks = nn.ModuleList(
        nn.Sequential(
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, INNER),
            nn.GELU(),
            nn.Dropout(DROPOUT),
            nn.Linear(INNER, WIDTH),
        )
        for _ in range(BLOCKS)
    )
    last = nn.Linear(WIDTH, 1)
    optimizer = torch.optim.SGD([*blocks.parameters(), *last.parameters()], RATE)
    x, y = torch.randn(ROWS * STEPS, WIDTH), torch.randn(ROWS * STEPS, 1)

    def train() -> None:
        for rows in range(0, len(x), ROWS):
            optimizer.zero_grad()
            hidden = x[rows : rows + ROWS]
            for block in blocks:
                if way == "none":
                    hidden = hidden + block(hidden)
                else:
                    hidden = hidden + checkpoint(block, hidden, use_reentrant=False)
            nn.functional.mse_loss(last(hidden), y[rows : rows + ROWS]).backward()
            optimizer.step()

    report(measured(train))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", help='"none" or "torch.utils.checkpoint".')
    main(**vars(parser.parse_args()))
