"""Recorder of the first train steps of a process, which ends the process after the last one."""

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdml.strategies.input.local_batch import ShareInfo
from tfdml.strategies.keras_seam.step.optimizers import distinct_names
from tfdml.verification import record
from tfdml.verification.digests import project, project_rows, row_digests
from tfdml.verification.record import Entry, Record
from tfdml.verification.request import Request

# A recurrent layer calls its cell once for each position of a sequence.
_MOST_CALLS = 4


class Replica:
    """A replica in the step that is being recorded.

    Args:
        number: Number of the replica in the job.
        rows: Number of rows that it computes on: one for a padded share.
        share: Its share of the global batch; None for the only replica.
        digests: Digest of each of the rows: uint64, shape `[rows]`.

    Attributes:
        layers: The layers that are being called, the innermost last.
    """

    def __init__(self, number: int, rows: int, share: ShareInfo | None, digests: np.ndarray):
        self.number, self.rows, self.digests = number, rows, digests
        self.own_rows = rows if share is None else min(rows, int(share.rows))
        self.layers: list[keras.layers.Layer] = []
        self._calls: dict[tuple[str, str], int] = {}

    def called(self, kind: str, name: str) -> str | None:
        """Returns a name for the next call of a layer, loss or optimizer; None after many.

        Args:
            kind: Kind of the entry.
            name: Name of the layer, loss or variable.
        """
        call = self._calls.get((kind, name), 0)
        self._calls[kind, name] = call + 1
        if call >= _MOST_CALLS:
            return None
        return f"{name}, call {call + 1}" if call else name


class Recorder:
    """Recorder of a process's train steps.

    Args:
        request: The request.

    Attributes:
        request: The same.
        record: The record, so far.
        step: Number of the current step; None outside of steps.
    """

    def __init__(self, request: Request):
        self.request = request
        self.record = Record([], {"layers": {}, "left_out": [], "repeated_rows": [], "steps": 0})
        self.step: int | None = None
        self._begun = 0
        # Each replica runs in a thread of its own.
        self._local = threading.local()

    @property
    def has_begun(self) -> bool:
        """True once a step has been recorded."""
        return self._begun > 0

    @property
    def facts(self) -> dict[str, Any]:
        """Facts of the record."""
        return self.record.facts

    @property
    def replica(self) -> Replica | None:
        """The calling replica, if its tensors can be recorded now."""
        in_step = self.step is not None and tf.executing_eagerly()
        return getattr(self._local, "replica", None) if in_step else None

    @contextlib.contextmanager
    def on_replica(self, number: int, share: ShareInfo | None, data: Any) -> Iterator[Replica]:
        """Context manager: a replica computes a step.

        Args:
            number: Number of the replica in the job.
            share: Its share, None for the only replica.
            data: Structure of the tensors that it computes on.
        """
        parts = [_rows_of(t) for t in tf.nest.flatten(data) if t is not None and t.shape.rank != 0]
        rows = len(parts[0])
        replica = Replica(number, rows, share, row_digests(parts, rows))
        own = replica.digests[: replica.own_rows]
        self._add(record.ROWS, "batch", number, record.BY_ROWS, own)
        self._local.replica = replica
        try:
            yield replica
        finally:
            self._local.replica = None

    # -- What steps note -----------------------------------------------------------------------

    def note_values(self, kind: str, name: str, values: Any) -> None:
        """Notes tensors of the calling replica: its rows, or an estimate by them.

        Args:
            kind: Kind of the entry.
            name: Name of the layer or loss; repeated calls get numbers.
            values: Structure of tensors.
        """
        replica = self.replica
        if replica is None:
            return
        name = replica.called(kind, name)
        if name is None:
            return
        leaves = [v for v in tf.nest.flatten(values) if tf.is_tensor(v)]
        for i, leaf in enumerate(leaves):
            label = name + (f"[{i}]" if i else "")
            array = _numbers(leaf)
            if array is None or array.size == 0:
                continue
            if array.ndim == 0:
                self._add(kind, label, replica.number, record.AS_MEAN, array)
            elif len(array) % replica.rows == 0:
                by_rows = array.reshape(replica.rows, -1)[: replica.own_rows]
                self._add(kind, label, replica.number, record.BY_ROWS, by_rows)
            else:
                self._add(kind, label, replica.number, record.AS_SAME, array)

    def note_gradients(self, kind: str, names: Sequence[str], gradients: Sequence) -> None:
        """Notes gradients of the calling replica: its summands, or the sums over all replicas.

        Args:
            kind: `GRADIENT` or `SUM`.
            names: Names of the variables, each its own.
            gradients: Dense or sparse gradients, or None.
        """
        replica = self.replica
        if replica is None:
            return
        layout = record.AS_SUM if kind == record.GRADIENT else record.AS_SAME
        for name, gradient in zip(names, gradients, strict=True):
            label = replica.called(kind, name)
            if gradient is None or label is None:
                continue
            if isinstance(gradient, tf.IndexedSlices):
                self._note_rows(name, np.asarray(gradient.indices))
            array = _numbers(tf.convert_to_tensor(gradient))
            self._add(kind, label, replica.number, layout, array)

    def _note_rows(self, name: str, rows: np.ndarray) -> None:
        """Notes a table of which a gradient has several parts for a row."""
        known = self.facts["repeated_rows"]
        if name not in known and len(np.unique(rows)) < len(rows):
            known.append(name)

    def note_rate(self, name: str, rate: Any) -> None:
        """Notes the learning rate of an optimizer in the calling replica.

        Args:
            name: Name of the optimizer.
            rate: The rate.
        """
        replica = self.replica
        label = None if replica is None else replica.called(record.RATE, name)
        if label is not None:
            self.note_number(record.RATE, label, rate, replica.number)

    def note_number(self, kind: str, name: str, number: Any, replica: int) -> None:
        """Notes a tensor of which each replica, or rank, has the whole."""
        self._add(kind, name, replica, record.AS_SAME, np.asarray(number))

    def note_layer(self, layer: keras.layers.Layer, facts: dict[str, Any]) -> None:
        """Notes facts of a layer."""
        self.facts["layers"].setdefault(layer.name, {}).update(facts)

    def _add(self, kind: str, name: str, replica: int, layout: str, array: np.ndarray) -> None:
        by_rows = layout == record.BY_ROWS
        size = math.prod(array.shape[1:] if by_rows else array.shape)
        if kind != record.ROWS:
            array = project_rows(array) if by_rows else project(array)
        self.record.entries.append(Entry(self.step, kind, name, replica, layout, size, array))

    # -- Steps ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """Context manager: a train step runs, which is recorded."""
        self.step = self._begun
        try:
            yield
        finally:
            self.step = None
        # At the end of the data there is no step.
        self._begun += 1

    def begin(self, model: keras.Model, rank: int) -> None:
        """Notes the initial weights.

        Args:
            model: The model.
            rank: This process's rank.
        """
        self.step = -1
        self._note_weights(model, rank)
        self.step = None

    def end(self, model: keras.Model, logs: Any, rank: int) -> None:
        """Notes weights and metrics after a step; after the last step, ends the process.

        Args:
            model: The model.
            logs: The step's logs.
            rank: This process's rank.

        Raises:
            SystemExit: After the last step.
        """
        self.step = self._begun - 1
        self._note_weights(model, rank)
        for name, value in logs.items() if isinstance(logs, dict) else ():
            for i, leaf in enumerate(tf.nest.flatten(value)):
                self.note_number(record.METRIC, f"{name}[{i}]" if i else name, leaf, rank)
        self.step = None
        self.facts["steps"] = self._begun
        if self._begun == self.request.steps:
            self.finish(rank)

    def _note_weights(self, model: keras.Model, rank: int) -> None:
        weights = model.weights
        for name, weight in zip(distinct_names(None, weights), weights, strict=True):
            self.note_number(record.WEIGHT, name, keras.ops.convert_to_numpy(weight), rank)

    def finish(self, rank: int) -> None:
        """Writes the record, and ends the process.

        Raises:
            SystemExit: Always; no `except Exception` of the script catches it.
        """
        self.record.save(self.request.directory, rank)
        raise SystemExit(0)


def _rows_of(tensor: Any) -> np.ndarray | list:
    """Returns a batch's tensor as an array, or as a list of its rows."""
    if isinstance(tensor, tf.SparseTensor):
        tensor = tf.sparse.to_dense(tensor)
    return tensor.to_list() if isinstance(tensor, tf.RaggedTensor) else np.asarray(tensor)


def _numbers(tensor: Any) -> np.ndarray | None:
    """Returns a tensor's numbers; None for strings, and for rows of different lengths."""
    if isinstance(tensor, tf.RaggedTensor):
        return None
    if isinstance(tensor, tf.SparseTensor):
        tensor = tf.sparse.to_dense(tensor)
    if not (tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_bool):
        return None
    return np.asarray(tensor).astype(np.float64)
