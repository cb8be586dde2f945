"""Rank of `tools.bench.divided_tables` with TorchRec, in a separate environment.

That environment has neither TensorFlow nor typer, and this module's `--help` works without PyTorch.
The tables are an EmbeddingBagCollection divided among the ranks on gloo, with SGD fused with the
backward pass; DistributedModelParallel makes the layers data-parallel.
"""

import argparse
import os
from typing import Any

from tools.bench.compression.model import Clock
from tools.bench.divided_tables.model import (
    ABOVE,
    BATCH,
    BELOW,
    BOUND,
    DENSE,
    RATE,
    ROWS,
    STEPS,
    TABLES,
    WARM_UP,
    WIDTH,
    batches,
    gathered_per_second,
    measured,
    rows_per_second,
)
from tools.bench.harness import report, threads_each

BY_ROWS, BY_TABLES = "rows", "tables"
KEYS = [f"table_{i}" for i in range(TABLES)]


def build(rows: int, by: str, ranks: int) -> Any:
    """Returns the network of `rank.build`, divided among the ranks.

    Args:
        rows: The number of rows of each table.
        by: BY_ROWS if each rank keeps a part of each table, BY_TABLES if it keeps some tables.
        ranks: The number of ranks.
    """
    import torch
    from torch import nn
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed import sharding_plan as plans
    from torchrec.distributed.types import ShardingPlan
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            configs = [
                EmbeddingBagConfig(
                    num_embeddings=rows,
                    embedding_dim=WIDTH,
                    name=key,
                    feature_names=[key],
                    init_fn=lambda table: nn.init.uniform_(table, -BOUND, BOUND),
                )
                for key in KEYS
            ]
            # Only a rank's own rows get memory and values, later.
            self.tables = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
            first, second = BELOW
            self.below = nn.Sequential(
                nn.Linear(DENSE, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU()
            )
            products, (first, second) = WIDTH + (TABLES + 1) ** 2, ABOVE
            self.above = nn.Sequential(
                nn.Linear(products, first), nn.ReLU(), nn.Linear(first, second)
            )

        def forward(self, dense: torch.Tensor, ids: Any) -> torch.Tensor:
            below = self.below(dense)
            looked_up = self.tables(ids).values().reshape(-1, TABLES, WIDTH)
            vectors = torch.cat([below[:, None], looked_up], dim=1)
            products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
            return self.above(torch.cat([below, products], dim=1))

    network = Network()
    apply_optimizer_in_backward(torch.optim.SGD, network.tables.parameters(), {"lr": RATE})
    # Tables side by side are on one rank, so that what is looked up is in the tables' order.
    each = {
        key: plans.row_wise() if by == BY_ROWS else plans.table_wise(rank=i * ranks // TABLES)
        for i, key in enumerate(KEYS)
    }
    divided = plans.construct_module_sharding_plan(
        network.tables, each, local_size=1, device_type="cpu"
    )
    plan = ShardingPlan(plan={"tables": divided})
    return DistributedModelParallel(network, device=torch.device("cpu"), plan=plan)


def by_table(ids: Any) -> Any:
    """Returns the ids of some samples, an array (samples, TABLES * k), in TorchRec's form."""
    import torch
    from torchrec import KeyedJaggedTensor

    samples, ids_each = len(ids), ids.shape[1] // TABLES
    values = torch.from_numpy(ids).view(samples, TABLES, ids_each).transpose(0, 1).reshape(-1)
    lengths = torch.full((TABLES * samples,), ids_each, dtype=torch.int32)
    return KeyedJaggedTensor(KEYS, values, lengths=lengths)


def own_values(model: Any) -> dict[str, tuple[Any, int, bool]]:
    """Returns this rank's values: by Keras's path the tensor, its first row, whether transposed."""
    found = {}
    for name, value in model.state_dict().items():
        part, *_, layer, kind = name.split(".")
        if part == "tables":
            for shard in value.local_shards():
                first = shard.metadata.shard_offsets[0]
                found[f"{layer}/embeddings"] = shard.tensor, first, False
        else:
            # Every second module of a sequence is an activation.
            path = f"{part}_{int(layer) // 2}/{'kernel' if kind == 'weight' else 'bias'}"
            found[path] = value, 0, kind == "weight"
    return found


def load(model: Any, values: Any) -> None:
    """Gives this rank's rows and layers the first values of `rank.train_plainly`."""
    import torch

    with torch.no_grad():
        for path, (tensor, first, is_transposed) in own_values(model).items():
            value = torch.from_numpy(values[f"first/{path}"])
            tensor.copy_((value.T if is_transposed else value)[first : first + len(tensor)])


def differences(model: Any, losses: Any, values: Any) -> dict[str, float]:
    """Returns by how much this rank's losses and values differ from plain Keras's.

    Args:
        model: The trained model.
        losses: The losses of the global batches, an array (WARM_UP + STEPS,).
        values: The arrays that `rank.train_plainly` has written.

    Returns:
        The largest difference of a loss; of tables and of layers, in parts of the largest change
        of a value of the variable.
    """
    import numpy as np

    found = {"losses": float(np.abs(losses - values["losses"]).max()), "tables": 0.0, "layers": 0.0}
    for path, (tensor, first, is_transposed) in own_values(model).items():
        before, last = values[f"first/{path}"], values[f"last/{path}"]
        own = (last.T if is_transposed else last)[first : first + len(tensor)]
        part = np.abs(tensor.numpy() - own).max() / np.abs(last - before).max()
        kind = "tables" if path.startswith("table_") else "layers"
        found[kind] = max(found[kind], float(part))
    return found


def used_per_second(rows: int) -> float:
    """Returns how many rows FBGEMM looks up and updates in a second, without a network."""
    import torch
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    table = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, WIDTH, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=EmbOptimType.EXACT_SGD,
        learning_rate=RATE,
    )

    def use(ids: Any) -> None:
        found = table(torch.from_numpy(ids), torch.arange(len(ids) + 1))
        found.backward(found.detach())

    return rows_per_second(rows, use)


def main(by: str, rows: int, ids_each: int, compare: str) -> None:
    """Times the steps, or compares the training with plain Keras's; rank 0 reports."""
    import numpy as np
    import torch
    import torch.distributed as dist
    from torch import nn

    rank, ranks = int(os.environ["NETLAB_RANK"]), int(os.environ["NETLAB_RANKS"])
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "eth0")
    torch.set_num_threads(threads_each(ranks))
    dist.init_process_group("gloo", init_method="tcp://host0:29500", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    model = build(rows, by, ranks)
    if compare:
        load(model, np.load(compare))
    layers = [p for name, p in model.named_parameters() if not name.startswith("tables")]
    optimizer = torch.optim.SGD(layers, RATE)
    loss = nn.BCEWithLogitsLoss()
    data, own, losses, clock = batches(rows, ids_each), BATCH // ranks, [], Clock()
    clock.start()
    for number in range(WARM_UP + STEPS):
        first = number * BATCH + rank * own
        ids, dense, y = (each[first : first + own] for each in data)
        optimizer.zero_grad()
        value = loss(model(torch.from_numpy(dense), by_table(ids)), torch.from_numpy(y))
        value.backward()
        optimizer.step()
        losses.append(value.item())
        clock.tick()
    if compare:
        means = torch.tensor(losses, dtype=torch.float64) / ranks
        dist.all_reduce(means)
        found = differences(model, means.numpy(), np.load(compare))
        every: list[Any] = [None] * ranks
        dist.all_gather_object(every, found)
        found = {kind: max(each[kind] for each in every) for kind in found}
    else:
        # The peak is that of the training.
        found = measured(clock)
        found |= {"alone": used_per_second(rows), "memory": gathered_per_second(rows)}
    if rank == 0:
        report(found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("by", choices=[BY_ROWS, BY_TABLES], help="How tables are divided.")
    parser.add_argument("--rows", type=int, default=ROWS, help="Rows of each table.")
    parser.add_argument("--ids-each", type=int, default=1, help="Ids of a sample for each table.")
    parser.add_argument("--compare", default="", help="File that plain Keras has written.")
    main(**vars(parser.parse_args()))
