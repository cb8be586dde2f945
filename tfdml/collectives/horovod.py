"""Collective over Horovod's operations (gloo, MPI or NCCL, depending on Horovod's build)."""

import importlib
from collections.abc import Callable, Sequence
from types import ModuleType

import tensorflow as tf

from tfdml import topology
from tfdml.collectives.collective import Collective
from tfdml.collectives.horovod_subgroup import HorovodSubgroup

# Bytes of a tensor that are broadcast at once. A message that takes gloo longer than 30 s ends the
# job: a table of 256 MB, as one message, does over 100 Mbit/s.
BROADCAST_BYTES = 32 << 20


class HorovodCollective(Collective):
    """Collective that uses Horovod; its launcher must have started the processes.

    Raises:
        ImportError: If Horovod is not installed, or was built for another TensorFlow.
        RuntimeError: If Horovod disagrees with the launcher about the number of processes.

    Reference:
        Sergeev and Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow",
        arXiv:1802.05799.
    """

    def __init__(self) -> None:
        self._graphs: dict[tuple, Callable] = {}
        self._subgroups: dict[tuple[int, ...], Collective] = {}
        launched = topology.launched()
        self._ops = _import_ops(launched)
        self._ops.init()
        super().__init__(
            topology.Topology(
                rank=self._ops.rank(),
                size=self._ops.size(),
                local_rank=self._ops.local_rank(),
                local_size=self._ops.local_size(),
                launcher=launched.launcher,
            )
        )
        # In elastic jobs the launcher's initial number of ranks may be outdated.
        if self.size != launched.size and not topology.is_elastic():
            raise RuntimeError(
                f"Horovod must see as many processes as the launcher started. Received: "
                f"{self.size} from Horovod, {launched.size} from {launched.launcher}. Start the "
                f"job with the launcher that Horovod was built for (`tfdml doctor` shows which)."
            )

    def subgroup(self, ranks: Sequence[int]) -> Collective:
        """Returns the collective between some of the processes; see `Collective`."""
        ranks = tuple(ranks)
        if len(ranks) == self.size:
            return self
        if ranks not in self._subgroups:
            self._subgroups[ranks] = HorovodSubgroup(self.rank, self.size, ranks, self._send_rows)
        return self._subgroups[ranks]

    def all_reduce(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Sums each tensor over all processes; see `Collective`."""
        # Horovod does not support bfloat16: the sum is computed in float32 and rounded once.
        dtype = tensors[0].dtype
        wire = [tf.cast(t, tf.float32) for t in tensors] if dtype == tf.bfloat16 else tensors

        def operation(*wire: tf.Tensor) -> list[tf.Tensor]:
            return self._ops.MPI_LIB.horovod_grouped_allreduce(
                wire,
                reduce_op=self._ops.Sum,
                prescale_factor=1.0,
                postscale_factor=1.0,
                name=_as_operation_name(name),
                ignore_name_scope=True,
            )

        sums = self._in_graph(operation, f"all_reduce:{name}", wire)
        return [tf.cast(s, dtype) for s in sums]

    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Concatenates the processes' tensors; see `Collective`."""

        def operation(wire: tf.Tensor) -> tf.Tensor:
            return self._ops.MPI_LIB.horovod_allgather(
                wire, name=_as_operation_name(name), ignore_name_scope=True
            )

        wire, unpack = _as_wire(tensor)
        gathered = unpack(self._in_graph(operation, f"all_gather:{name}", [wire]))
        return tf.ensure_shape(gathered, [None, *tensor.shape.as_list()[1:]])

    def all_to_all(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Sends row i to process i; see `Collective`."""
        return tf.ensure_shape(self._send_rows(tensor, [1] * self.size, name), tensor.shape)

    def all_to_all_rows(self, tensor: tf.Tensor, counts: Sequence[int], name: str) -> tf.Tensor:
        """Sends consecutive rows to each process; see `Collective`."""
        received = self._send_rows(tensor, counts, name)
        own = [self.size, counts[self.rank], *tensor.shape.as_list()[1:]]
        return tf.reshape(received, own)

    def all_to_all_ragged(
        self, tensor: tf.Tensor, counts: tf.Tensor, name: str
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Sends consecutive rows to each process; see `Collective`."""
        rows, received = self._exchange_rows(tensor, counts, name)
        rows = tf.ensure_shape(rows, [None, *tensor.shape.as_list()[1:]])
        return rows, tf.ensure_shape(received, [self.size])

    def _send_rows(
        self, tensor: tf.Tensor, counts: Sequence[tf.Tensor | int], name: str
    ) -> tf.Tensor:
        """Sends consecutive rows to each process; returns the rows received, in rank order.

        Args:
            tensor: A tensor of any dtype but string, shape `[sum of counts, ...]`.
            counts: The number of rows for each process.
            name: The operation's name.
        """
        return self._exchange_rows(tensor, tf.convert_to_tensor(list(counts), tf.int32), name)[0]

    def _exchange_rows(
        self, tensor: tf.Tensor, counts: tf.Tensor, name: str
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the rows received, in rank order, and how many each process has sent."""

        def operation(wire: tf.Tensor, splits: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            # Horovod exchanges the numbers of rows itself.
            return self._ops.MPI_LIB.horovod_alltoall(
                wire, splits=splits, name=_as_operation_name(name), ignore_name_scope=True
            )

        wire, unpack = _as_wire(tensor)
        rows, received = self._in_graph(operation, f"all_to_all:{name}", [wire, counts])
        return unpack(rows), received

    def broadcast(self, tensor: tf.Tensor, name: str, root: int = 0) -> tf.Tensor:
        """Sends the tensor of `root` to every process; see `Collective`."""
        wire, unpack = _as_wire(tensor)
        size, most = wire.shape.num_elements(), BROADCAST_BYTES // wire.dtype.size
        if size is None or size <= most:
            value = self._broadcast(wire, name, root)
        else:
            flat = tf.reshape(wire, [-1])
            parts = [
                self._broadcast(flat[first : first + most], f"{name}/{first // most}", root)
                for first in range(0, size, most)
            ]
            value = tf.reshape(tf.concat(parts, 0), wire.shape)
        return tf.ensure_shape(unpack(value), tensor.shape)

    def _broadcast(self, wire: tf.Tensor, name: str, root: int) -> tf.Tensor:
        def operation(wire: tf.Tensor) -> tf.Tensor:
            return self._ops.MPI_LIB.horovod_broadcast(
                wire, root_rank=root, name=_as_operation_name(name), ignore_name_scope=True
            )

        return self._in_graph(operation, f"broadcast:{name}:{root}", [wire])

    def _in_graph(self, operation: Callable, key: str, tensors: Sequence[tf.Tensor]):
        """Runs `operation`, in a graph of its own when called eagerly.

        Horovod's operations lose their names when they are executed eagerly. A graph is traced once
        per key and dtypes, whatever the shapes.
        """
        if not tf.executing_eagerly():
            return operation(*tensors)
        dtypes = tuple(t.dtype for t in tensors)
        if (key, dtypes) not in self._graphs:
            signature = [tf.TensorSpec(None, dtype) for dtype in dtypes]
            function = tf.function(operation, input_signature=signature)
            self._graphs[key, dtypes] = function.get_concrete_function()
        return self._graphs[key, dtypes](*tensors)


def _as_operation_name(name: str) -> str:
    # With `ignore_name_scope`, Horovod uses only the part of the name after the last slash.
    return name.replace("/", ".")


# Dtypes that Horovod's operations support; other dtypes, except strings, are sent as bytes.
_WIRE_DTYPES = frozenset(
    {tf.uint8, tf.int8, tf.int32, tf.int64, tf.float16, tf.float32, tf.float64}
)


def _as_wire(tensor: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """Returns `tensor` in a dtype that Horovod supports, and the function that converts it back."""
    dtype = tensor.dtype
    if dtype in _WIRE_DTYPES:
        return tensor, lambda wire: wire
    if dtype == tf.bool:
        return tf.cast(tensor, tf.uint8), lambda wire: tf.cast(wire, tf.bool)
    return tf.bitcast(tensor, tf.uint8), lambda wire: tf.bitcast(wire, dtype)


def _import_ops(launched: topology.Topology) -> ModuleType:
    try:
        return importlib.import_module("horovod.tensorflow.mpi_ops")
    except ImportError as error:
        raise ImportError(
            f"Horovod must be installed for TensorFlow {tf.__version__} to run on several "
            f"processes. Received: rank {launched.rank} of {launched.size}, started by "
            f"{launched.launcher}, and on import: {error}. Run `tfdml build-horovod` in this "
            f"environment, or start the script without a launcher to run on one process."
        ) from error
