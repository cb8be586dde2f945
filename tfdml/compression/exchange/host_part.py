"""Division of a bucket's gradients among the owners of all hosts."""

import dataclasses
import json
import math

import numpy as np

from tfdml.compression.exchange.native_stages import chunk_length


@dataclasses.dataclass(frozen=True)
class HostPart:
    """A codec's part of a bucket, divided among the owners of all hosts.

    The values are cut into P slices, one for each owner of a host, and each slice into H chunks,
    one for each host. The owner with index p on host h sums slice p of its host, and chunk h of
    that slice of all hosts.

    Attributes:
        names: Paths of the gradients' variables.
        shapes: The gradients' shapes.
        hosts: The number of hosts, H.
        owners: The number of owners on each host, P.
        block: Values of an encoding block; chunks are whole blocks.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    hosts: int
    owners: int
    block: int

    @property
    def length(self) -> int:
        """The number of values."""
        return sum(map(math.prod, self.shapes))

    @property
    def chunk(self) -> int:
        """Values of a chunk."""
        return chunk_length(self.length, self.hosts * self.owners, self.block)

    @property
    def slice_length(self) -> int:
        """Values of a slice."""
        return self.hosts * self.chunk

    def chunk_number(self, host: int, index: int) -> int:
        """Returns the number of an owner's chunk among all chunks.

        Args:
            host: Index of the owner's host.
            index: Index of the owner on its host.
        """
        return index * self.hosts + host

    def packed(self) -> np.ndarray:
        """Returns this division as bytes, which checkpoints keep: uint8, shape `[n]`."""
        text = json.dumps(dataclasses.asdict(self))
        return np.frombuffer(text.encode(), np.uint8)

    @classmethod
    def unpacked(cls, packed: np.ndarray) -> "HostPart":
        """Returns the division that `packed` returned as bytes."""
        fields = json.loads(bytes(packed.tolist()))
        shapes = tuple(tuple(shape) for shape in fields.pop("shapes"))
        return cls(names=tuple(fields.pop("names")), shapes=shapes, **fields)
