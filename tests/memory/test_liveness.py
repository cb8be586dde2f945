"""Checks the bytes of tensors that are alive at once, and blocks of checkpointing, by hand."""

import dataclasses

import pytest

from tfdml.memory.checkpointing import best_blocks
from tfdml.memory.graph_nodes import StepNodes
from tfdml.memory.liveness import Node, Peak, find_peak

# a makes 0; b makes 1 from 0; c makes 2 from 1; d needs 0 again.
CHAIN = [
    Node("a", (), (0,)),
    Node("b", (0,), (1,)),
    Node("c", (1,), (2,)),
    Node("d", (2, 0), (3,)),
]
SIZES = [10, 20, 20, 1]


def test_nothing_is_alive_without_operations():
    assert find_peak([], []) == Peak(0, -1)


def test_a_tensor_is_alive_from_its_operation_to_its_last_reader():
    # At c: 10 (d reads it) + 20 + 20.
    assert find_peak(CHAIN, SIZES) == Peak(50, 2)


def test_an_operation_in_place_takes_over_the_memory_of_an_input():
    in_place = [*CHAIN[:2], dataclasses.replace(CHAIN[2], in_place=True), CHAIN[3]]
    # 10 + 20 at b, and no more at c, whose result is in the memory of 1; at d 10 + 20 + 1.
    assert find_peak(in_place, SIZES) == Peak(31, 3)


def test_an_input_that_somebody_else_needs_is_not_taken_over():
    nodes = [
        Node("a", (), (0,)),
        Node("b", (0,), (1,), in_place=True),
        Node("c", (0, 1), (2,), in_place=True),
    ]
    # At c one of both inputs is taken over, not both.
    assert find_peak(nodes, [8, 8, 8]) == Peak(16, 1)


def test_an_input_of_another_size_is_not_taken_over():
    nodes = [Node("a", (), (0,)), Node("b", (0,), (1,), in_place=True)]
    assert find_peak(nodes, [10, 20]) == Peak(30, 1)


def test_held_and_weightless_buffers():
    assert find_peak(CHAIN, SIZES, held={1}) == Peak(51, 3)
    assert find_peak(CHAIN, SIZES, weightless={0, 2}) == Peak(20, 1)
    assert find_peak(CHAIN[1:], SIZES, given={0}) == Peak(50, 1)
    assert find_peak([], SIZES, given={0, 1}) == Peak(30, -1)


def test_what_an_operation_takes_inside_counts_while_it_runs():
    nodes = [*CHAIN[:1], Node("b", (0,), (1,), inside=100), *CHAIN[2:]]
    assert find_peak(nodes, SIZES) == Peak(130, 1)


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
