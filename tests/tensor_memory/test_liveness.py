"""Checks the bytes of tensors that are alive at once, by hand."""

import dataclasses

from tfdml.tensor_memory.liveness import Node, Peak, find_peak

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
