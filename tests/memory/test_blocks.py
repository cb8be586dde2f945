"""Checks the blocks of checkpointing, by hand."""

import pytest

from tfdml.memory.checkpointing import best_blocks
from tfdml.tensor_memory.graph_nodes import StepNodes
from tfdml.tensor_memory.liveness import Node


def layers(count: int, inner: int, between: int) -> StepNodes:
    """Returns a step whose layers each keep `inner` bytes and pass on `between` bytes."""
    nodes, sizes = [Node("batch", (), (0,))], [between]
    for i in range(count):
        nodes.append(Node(f"inner{i}", (2 * i,), (2 * i + 1,)))
        nodes.append(Node(f"out{i}", (2 * i + 1,), (2 * i + 2,)))
        sizes += [inner, between]
    forward = len(nodes)
    for i in reversed(range(count)):
        nodes.append(Node(f"gradient_tape/{i}", (2 * i, 2 * i + 1), ()))
    return StepNodes(nodes, sizes, len(nodes), forward, frozenset(), ())


def test_checkpointing_keeps_inputs_of_blocks_and_one_inside():
    # 16 layers keep 16 x (90 + 10). In k blocks: (k - 1) x 10 and 1600 / k: least at 4 x 4 layers
    # with 30 + 400, or a little beside it.
    steps = layers(16, inner=90, between=10)
    found = best_blocks(steps)
    assert found.kept == 1600
    sizes = {k: (k - 1) * 10 + 1600 // k for k in (1, 2, 4, 8, 16)}
    assert min(sizes.values()) == sizes[16] == 250
    # The bound on a block's inside is tried in 40 steps of 1600 / 40 bytes.
    assert 250 <= found.nbytes <= 250 + 1600 // 40
    assert found.count in (14, 15, 16)


def test_checkpointing_gains_nothing_where_everything_is_passed_on():
    """Each layer reads all layers before it, so all of them cross every cut."""
    nodes = [Node(f"layer{i}", tuple(range(i)), (i,)) for i in range(4)]
    nodes.append(Node("gradient_tape", (0, 1, 2, 3), ()))
    found = best_blocks(StepNodes(nodes, [100] * 4, 5, 4, frozenset(), ()))
    assert found.count == 1
    assert found.nbytes == found.kept == 400


@pytest.mark.parametrize("count", [1, 2])
def test_few_layers_can_be_divided(count):
    found = best_blocks(layers(count, inner=90, between=10))
    assert found.nbytes <= found.kept == 100 * count
