"""Order of a pipeline's calls in a graph: each stage works on microbatches as its schedule says.

A step is traced one microbatch after the other, but a schedule makes forward passes of later
microbatches before backward passes of earlier ones. So the order is added to the finished graph:
each call of a stage gets control inputs from the stage's calls before it. The backward call of a
stage is TensorFlow's gradient of its function, and is moved to the stage's device.

This module depends on internals of `tf.function` (TensorFlow 2.20, 2.21): the names of the
functions of gradients, and operations of an unfinished graph that can be changed.
"""

import re
from collections import defaultdict
from collections.abc import Sequence

import tensorflow as tf

from tfdml.pipeline.schedule import Task, stage_order

_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_STAGE = re.compile(r"(__backward_)?pipeline_stage_(\d+)_of_\d+")
# What TensorFlow computes from gradients on their way from a stage to another one.
_BETWEEN = ("AddN", "ZerosLike", "Identity", "Fill", "Shape", "Cast", "AddV2")


class TaskOrder:
    """The calls of a step's stages, noted while the step is traced; nothing when it runs eagerly.

    Args:
        devices: The device of each stage.
        num_microbatches: The number of microbatches.
        schedule: The schedule: "1f1b" or "gpipe".
    """

    def __init__(self, devices: Sequence[str], num_microbatches: int, schedule: str):
        self._devices, self._count, self._schedule = devices, num_microbatches, schedule
        self._calls: dict[tuple[int, Task], list[tf.Operation]] = defaultdict(list)
        self._seen = len(_operations())

    def note(self, microbatch: int) -> None:
        """Notes the calls for one microbatch, which has just been traced."""
        operations = _operations()
        new = operations[self._seen :]
        self._seen = len(operations)
        for operation in new:
            found = operation.type in _CALLS and _STAGE.search(operation.get_attr("f").name)
            if not found:
                continue
            stage, is_backward = int(found[2]), bool(found[1])
            task = Task("backward" if is_backward else "forward", microbatch)
            self._calls[stage, task].append(operation)
            if is_backward:
                _place(operation, self._devices[stage], {o.name for o in new})

    def add(self) -> None:
        """Adds the order to the graph."""
        for stage in range(len(self._devices)):
            tasks = stage_order(stage, len(self._devices), self._count, self._schedule)
            calls = [self._calls[stage, task] for task in tasks]
            # A stage whose gradient nobody needs has no backward calls.
            present = [own for own in calls if own]
            for before, after in zip(present, present[1:], strict=False):
                for operation in after:
                    operation._add_control_inputs(before)


def _place(operation: tf.Operation, device: str, new: set[str]) -> None:
    """Places a backward call on its stage's device, and the sums of gradients that it takes."""
    waiting = [operation]
    while waiting:
        reached = waiting.pop()
        reached._set_device(device)
        makers = [tensor.op for tensor in reached.inputs]
        waiting += [op for op in makers if op.name in new and op.type in _BETWEEN]


def _operations() -> list[tf.Operation]:
    """Returns the operations of the graph that is being traced."""
    if tf.executing_eagerly():
        return []
    return tf.compat.v1.get_default_graph().get_operations()
