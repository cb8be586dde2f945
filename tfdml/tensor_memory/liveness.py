"""How many bytes the tensors of a graph take while its operations run one after the other."""

import dataclasses
from collections.abc import Collection, Sequence


@dataclasses.dataclass(frozen=True)
class Node:
    """An operation: the buffers that it reads and allocates.

    Attributes:
        name: Name of the operation; another trace of the same step may give it another one.
        reads: Numbers of the buffers that it reads.
        makes: Numbers of the buffers that it allocates; each buffer has one such operation.
        in_place: Whether an output takes over the memory of an input that nobody else needs.
        inside: Bytes that it takes only while it runs, as the body of a loop does.
    """

    name: str = dataclasses.field(compare=False)
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    in_place: bool = False
    inside: int = 0


@dataclasses.dataclass(frozen=True)
class Peak:
    """The moment at which most bytes are taken.

    Attributes:
        nbytes: Bytes at that moment.
        place: Index of the operation that runs at that moment; -1 without operations.
    """

    nbytes: int
    place: int


def last_uses(nodes: Sequence[Node]) -> dict[int, int]:
    """Returns for each buffer the index of the last operation that reads or makes it."""
    last: dict[int, int] = {}
    for index, node in enumerate(nodes):
        for buffer in (*node.makes, *node.reads):
            last[buffer] = index
    return last


def find_peak(
    nodes: Sequence[Node],
    sizes: Sequence[int],
    weightless: Collection[int] = (),
    held: Collection[int] = (),
    given: Collection[int] = (),
) -> Peak:
    """Finds the moment at which most bytes are taken.

    A buffer is there from the operation that makes it to the last one that reads it.

    Args:
        nodes: The operations, in the order in which they run.
        sizes: Bytes of each buffer.
        weightless: Buffers that are not counted.
        held: Buffers that are kept to the end.
        given: Buffers that are there from the beginning.
    """
    last = last_uses(nodes)
    ends: dict[int, list[int]] = {}
    for buffer, index in last.items():
        if buffer not in held:
            ends.setdefault(index, []).append(buffer)
    size = [0 if buffer in weightless else nbytes for buffer, nbytes in enumerate(sizes)]
    there = set(given)
    now = sum(size[buffer] for buffer in there)
    peak = Peak(now, -1)
    for index, node in enumerate(nodes):
        ended = [b for b in ends.get(index, ()) if b in there]
        if node.in_place and node.makes:
            # The first output takes over the memory of one input of its size, no more.
            heir = node.makes[0]
            given = next((b for b in ended if b not in node.makes and size[b] == size[heir]), None)
            if given is not None:
                now -= size[given]
                there.discard(given)
        for buffer in node.makes:
            if buffer not in there:
                there.add(buffer)
                now += size[buffer]
        if now + node.inside > peak.nbytes:
            peak = Peak(now + node.inside, index)
        for buffer in ends.get(index, ()):
            if buffer in there:
                there.discard(buffer)
                now -= size[buffer]
    return peak
