"""Network and local step of the PyTorch ranks of `tools.bench.slow_networks`.

PyTorch is imported where it is used: the tests have none.
"""

from typing import Any

from tools.bench.compression.model import CLASSES, GLOBAL_BATCH, WIDTH
from tools.bench.compression.torch_rank import build as build_mlp

# Of the small transformer: as `networks.text` of `tools.bench.compression`.
CHARACTERS, LENGTH, FEATURES, HEADS, BLOCKS = 128, 64, 64, 4, 2


def build_text() -> Any:
    """Returns the transformer of the TensorFlow ranks."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(FEATURES, 1e-3), nn.LayerNorm(FEATURES, 1e-3)
            self.inputs = nn.Linear(FEATURES, 3 * FEATURES)
            self.outputs = nn.Linear(FEATURES, FEATURES)
            hidden = nn.Linear(FEATURES, 4 * FEATURES), nn.GELU(), nn.Linear(4 * FEATURES, FEATURES)
            self.dense = nn.Sequential(*hidden)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = self.inputs(self.first(x)).chunk(3, dim=-1)
            q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
            attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.outputs(attended.transpose(1, 2).flatten(2))
            return x + self.dense(self.second(x))

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.characters = nn.Embedding(CHARACTERS, FEATURES)
            self.positions = nn.Parameter(0.05 * torch.randn(LENGTH, FEATURES))
            self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
            self.last = nn.LayerNorm(FEATURES, 1e-3)
            self.classes = nn.Linear(FEATURES, CHARACTERS)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.blocks(self.characters(x) + self.positions)
            return self.classes(self.last(x)).flatten(0, 1)

    return Network()


def agree(value: float) -> float:
    """Returns the mean of all ranks' numbers."""
    import torch
    import torch.distributed as dist

    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


class Training:
    """A model, its optimizer and a local step.

    Args:
        network: Name of the network.
        hosts: Number of hosts, with a rank each.
    """

    def __init__(self, network: str, hosts: int) -> None:
        import torch
        from torch import nn

        torch.manual_seed(0)
        rows = GLOBAL_BATCH // hosts
        if network == "mlp":
            self.model = build_mlp()
            self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01, momentum=0.9)
            self._x, self._y = torch.randn(rows, WIDTH), torch.randint(0, CLASSES, (rows,))
        else:
            self.model = build_text()
            self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-3)
            self._x = torch.randint(0, CHARACTERS, (rows, LENGTH))
            self._y = torch.randint(0, CHARACTERS, (rows * LENGTH,))
        self._loss = nn.CrossEntropyLoss()

    def step(self) -> None:
        """Trains on a batch."""
        self.optimizer.zero_grad()
        self._loss(self.model(self._x), self._y).backward()
        self.optimizer.step()

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(p.numel() for p in self.model.parameters())
