"""Collective over TensorFlow's own ring or NCCL operations, between a cluster's servers."""

import copy
import itertools
import zlib
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdml.collectives.collective import Collective, LocalCollective
from tfdml.collectives.unmanaged_variable import unmanaged_variable
from tfdml.topology import Topology

# Each device type and index has one group over all processes, with a key of its own from here on;
# TensorFlow's strategies number their groups from 1.
_GROUP_KEY = 0x7FD31

# Groups of other members get the key of a text. Group keys are int32; fixed ones are lower.
_FIRST_NAMED_GROUP = 1 << 20
_NAMED_GROUPS = 2**31 - _FIRST_NAMED_GROUP

# Instance keys are int32: their number, which is prime, and the key's offset per element.
_KEYS = 2**31 - 1
_KEY_STRIDE = 1_000_003

# Operations of a device that may run at once between processors: one sends while another adds up.
_LANES = 4

# Bytes that a ring between processors sums at once: TensorFlow copies them, and takes new memory,
# which is slow, for copies of many more.
RING_BYTES = 4 << 20

# Dtypes that TensorFlow's gathers and broadcasts support; others are converted to one of these.
_WIRE_DTYPES = frozenset({tf.int32, tf.int64, tf.float16, tf.float32, tf.float64})


class _GroupCollective(Collective):
    """Collective operations of a device among the devices of a group.

    Args:
        topology: This process's rank in the group, and the group's size.
        device: This process's device.
        member: The device as a member of the group.
    """

    def __init__(self, topology: Topology, device: str, member: "GroupMember"):
        super().__init__(topology)
        self._device, self._member = device, member
        self._in_any_order: Collective | None = None

    def all_reduce(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Sums each tensor over all processes; see `Collective`."""
        with tf.device(self._device):
            return self._member.all_reduce(tensors, name)

    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Concatenates the processes' tensors; see `Collective`."""
        with tf.device(self._device):
            wire, unpack = _as_words(tensor)
            rows = tf.shape(wire)[:1]
            counts = self._gather(rows, f"{name}/rows")
            # Every process must send the same shape: pad to the longest, and cut off the padding.
            most = tf.reduce_max(counts)
            missing = most - rows[0]
            rank = wire.shape.rank
            padded = tf.pad(wire, tf.concat([[[0, missing]], tf.zeros([rank - 1, 2], tf.int32)], 0))
            # Empty tensors cannot be sent: if all are empty, send a row of zeros, then drop it.
            padded = tf.cond(
                most > 0,
                lambda: padded,
                lambda: tf.zeros(tf.concat([[1], tf.shape(wire)[1:]], 0), wire.dtype),
            )
            gathered = self._gather(tf.reshape(padded, [-1]), name)
            gathered = tf.reshape(gathered, tf.concat([[-1], tf.shape(wire)[1:]], 0))
            present = tf.sequence_mask(counts, tf.maximum(most, 1))
            gathered = tf.boolean_mask(gathered, tf.reshape(present, [-1]))
            return tf.ensure_shape(unpack(gathered), [None, *tensor.shape.as_list()[1:]])

    def all_gather_rows(self, tensor: tf.Tensor, counts: Sequence[int], name: str) -> tf.Tensor:
        """Concatenates the processes' tensors; see `Collective`."""
        with tf.device(self._device):
            wire, unpack = _as_wire(tensor)
            most, rest = max(counts), wire.shape.as_list()[1:]
            padded = tf.pad(wire, [[0, most - counts[self.rank]], *[[0, 0]] * len(rest)])
            gathered = self._gather(tf.reshape(padded, [-1]), name)
            rows = tf.unstack(tf.reshape(gathered, [self.size, most, *rest]))
            present = [row[:count] for row, count in zip(rows, counts, strict=True)]
            return unpack(tf.concat(present, 0))

    def all_to_all(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Sends row i to process i; see `Collective`."""
        with tf.device(self._device):
            wire, unpack = _as_words(tensor)
            received = tf.raw_ops.CollectiveAllToAllV2(
                input=wire,
                ordering_token=self._member.order(name),
                **self._member.arguments("all_to_all", wire, name),
            )
            return tf.ensure_shape(unpack(received), tensor.shape)

    @property
    def in_any_order(self) -> Collective | None:
        """Collective of the same group without an order, None between GPUs; see `Collective`.

        Tokens order operations as they were made. NCCL needs that; a ring between processors does
        not, because each of its operations waits in a thread of its own.
        """
        if self._in_any_order is None and "GPU" not in self._device:
            member = self._member.in_any_order()
            self._in_any_order = _GroupCollective(self.topology, self._device, member)
        return self._in_any_order

    def broadcast(self, tensor: tf.Tensor, name: str, root: int = 0) -> tf.Tensor:
        """Sends the tensor of `root` to every process; see `Collective`."""
        with tf.device(self._device):
            wire, unpack = _as_wire(tensor)
            flat = tf.reshape(wire, [-1])
            arguments = self._member.arguments("broadcast", flat, name)
            if self.rank == root:
                value = tf.raw_ops.CollectiveBcastSendV2(input=flat, **arguments)
            else:
                value = tf.raw_ops.CollectiveBcastRecvV2(
                    shape=tf.shape(flat), T=flat.dtype, **arguments
                )
            return tf.ensure_shape(unpack(tf.reshape(value, tf.shape(wire))), tensor.shape)

    def _gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return tf.raw_ops.CollectiveGatherV2(
            input=tensor,
            ordering_token=self._member.order(name),
            **self._member.arguments("gather", tensor, name),
        )


class TensorFlowCollective(_GroupCollective):
    """Collective that uses TensorFlow's collective operations.

    TensorFlow's server must run in this process (see `tfdml.strategies.cluster_member`).

    Args:
        topology: This process's rank and the cluster's size.
        devices: This process's devices, with job and task. The first one takes part in all
            operations for which no other device is chosen by `on`.
        options: Communication options: the implementation, and a time limit in seconds.
    """

    def __init__(
        self,
        topology: Topology,
        devices: Sequence[str],
        options: tf.distribute.experimental.CommunicationOptions,
    ):
        device, *others = devices
        self._options = options
        number = tf.DeviceSpec.from_string(device).device_index
        self._key = _GROUP_KEY + 2 * number + ("GPU" in device)
        super().__init__(topology, device, GroupMember(device, self._key, topology.size, options))
        self._subgroups: dict[tuple[int, ...], Collective] = {}
        self._others = {d: TensorFlowCollective(topology, [d], options) for d in others}
        self._concurrent_with_steps: Collective = self
        if "GPU" in self._device:
            host = tf.DeviceSpec.from_string(self._device).replace(
                device_type="CPU", device_index=0
            )
            ring = tf.distribute.experimental.CommunicationOptions(
                timeout_seconds=options.timeout_seconds,
                implementation=tf.distribute.experimental.CommunicationImplementation.RING,
            )
            self._concurrent_with_steps = TensorFlowCollective(topology, [host.to_string()], ring)

    def on(self, device: str | None) -> Collective:
        """Returns the collective of a device and its peers; see `Collective`."""
        return self._others.get(device, self)

    def subgroup(self, ranks: Sequence[int]) -> Collective:
        """Returns the collective between some of the processes; see `Collective`."""
        ranks = tuple(ranks)
        if len(ranks) == self.size:
            return self
        if ranks not in self._subgroups:
            self._subgroups[ranks] = self._new_subgroup(ranks)
        return self._subgroups[ranks]

    def _new_subgroup(self, ranks: tuple[int, ...]) -> Collective:
        if len(ranks) == 1:
            return LocalCollective()
        # NCCL needs one order of all of a device's operations, whatever their group. A ring does
        # not: exchanges within a host and between hosts may overlap.
        tokens = self._member.tokens if "GPU" in self._device else None
        member = GroupMember(
            self._device, named_group(f"{self._key} {ranks}"), len(ranks), self._options, tokens
        )
        return _GroupCollective(Topology(ranks.index(self.rank), len(ranks)), self._device, member)

    @property
    def concurrent_with_steps(self) -> Collective:
        """Collective for a second thread: a ring between the hosts' memories if steps use GPUs."""
        return self._concurrent_with_steps


class GroupMember:
    """A device as a member of a group, for TensorFlow's collective operations.

    Args:
        device: The device's name.
        group_key: The group's key.
        group_size: The number of members.
        options: Communication options.
        tokens: Tokens that order the device's operations; shared by its groups if they must run one
            after another. New ones by default.
    """

    def __init__(
        self,
        device: str,
        group_key: int,
        group_size: int,
        options: tf.distribute.experimental.CommunicationOptions,
        tokens: Sequence[tf.Variable] | None = None,
    ):
        self._names: dict[int, str] = {}
        self._common = {
            "group_size": group_size,
            "group_key": group_key,
            "communication_hint": options.implementation.value.lower(),
            "timeout_seconds": float(options.timeout_seconds or 0),
        }
        self._device = device
        self._is_ring = "GPU" not in device
        # Operations with the same token run in the order in which they are traced. A GPU has one:
        # NCCL hangs when two processes launch kernels in different orders. Processors take turns
        # with several, and so have few operations at once. Without a token of its own, a graph
        # would order them with all other stateful operations, of all devices.
        own = range(_LANES if self._is_ring else 1)
        self.tokens = [_new_token(device) for _ in own] if tokens is None else tokens
        self._next_token = itertools.cycle(self.tokens)
        # Without an order, each operation's own token, by its name.
        self._own_tokens: dict[str, tf.Variable] | None = None

    def order(self, name: str) -> list[tf.Tensor]:
        """Returns an operation's ordering token: those with the same one run one after another.

        Args:
            name: The operation's name.
        """
        if self._own_tokens is None:
            return [next(self._next_token).handle]
        if name not in self._own_tokens:
            self._own_tokens[name] = _new_token(self._device)
        return [self._own_tokens[name].handle]

    def in_any_order(self) -> "GroupMember":
        """Returns the same member, whose operations run in any order."""
        member = copy.copy(self)
        member._own_tokens = {}
        return member

    def all_reduce(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Sums each tensor over the group; see `Collective`."""
        flat = [tf.reshape(t, [-1]) for t in tensors]
        packed = flat[0] if len(flat) == 1 else tf.concat(flat, 0)
        pieces = self._pieces(packed)
        sums = [self._sum(piece, f"{name}/{i}" if i else name) for i, piece in enumerate(pieces)]
        total = sums[0] if len(sums) == 1 else tf.concat(sums, 0)
        sizes = [tf.size(t) for t in flat]
        parts = [total] if len(flat) == 1 else tf.split(total, sizes, num=len(flat))
        return [
            tf.ensure_shape(tf.reshape(part, tf.shape(t)), t.shape)
            for part, t in zip(parts, tensors, strict=True)
        ]

    def _pieces(self, packed: tf.Tensor) -> list[tf.Tensor]:
        """Returns a vector's parts, of about equal size, that are summed by themselves."""
        size = packed.shape[0]
        if size is None or not self._is_ring:
            return [packed]
        number = max(1, -(-size * packed.dtype.size // RING_BYTES))
        most = -(-size // number)
        return [packed[first : first + most] for first in range(0, size, most)] or [packed]

    def _sum(self, vector: tf.Tensor, name: str) -> tf.Tensor:
        return tf.raw_ops.CollectiveReduceV2(
            input=vector,
            merge_op="Add",
            final_op="Id",
            ordering_token=self.order(name),
            **self.arguments("reduce", vector, name),
        )

    def arguments(self, kind: str, tensor: tf.Tensor, name: str) -> dict:
        """Returns the arguments that pair an operation with the other processes' by its name's key.

        TensorFlow remembers the kind, dtype and shape that a key stands for, so they are part of
        the key: the (flat) tensor's size is added when the operation runs, because it may change.
        """
        name = f"{kind} {tensor.dtype.name} {name}"
        key = zlib.crc32(name.encode()) % _KEYS
        other = self._names.setdefault(key, name)
        if other != name:
            raise ValueError(
                f"`name` must not share its key with another collective's. Received: {name!r} "
                f"after {other!r}, both with key {key}. Rename one of them."
            )
        key = (key + tf.size(tensor, tf.int64) * _KEY_STRIDE) % _KEYS
        return {**self._common, "instance_key": tf.cast(key, tf.int32)}


def _new_token(device: str) -> tf.Variable:
    """Returns a variable that is nothing but a name for an order."""
    with tf.init_scope(), tf.device(device):
        return unmanaged_variable(tf.constant(0.0))


def named_group(name: str) -> int:
    """Returns the key of a group.

    Args:
        name: Text that says which devices of which ranks are its members.
    """
    return _FIRST_NAMED_GROUP + zlib.crc32(name.encode()) % _NAMED_GROUPS


def _as_wire(tensor: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """Returns `tensor` in a supported dtype, and the function that converts it back."""
    dtype = tensor.dtype
    if dtype in _WIRE_DTYPES:
        return tensor, lambda wire: wire
    carrier = {1: tf.int32, 2: tf.float16, 4: tf.int32, 8: tf.int64}[dtype.size]
    if dtype.size == 1:
        return tf.cast(tensor, carrier), lambda wire: tf.cast(wire, dtype)
    return tf.bitcast(tensor, carrier), lambda wire: tf.bitcast(wire, dtype)


def _as_words(tensor: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """Returns the rows of `tensor` in a supported dtype, packing bytes into words if possible."""
    columns = tensor.shape[1] if tensor.shape.rank == 2 else None
    if tensor.dtype != tf.uint8 or columns is None or columns % 4:
        return _as_wire(tensor)
    words = tf.bitcast(tf.reshape(tensor, [-1, columns // 4, 4]), tf.int32)
    return words, lambda wire: tf.reshape(tf.bitcast(wire, tf.uint8), [-1, columns])
