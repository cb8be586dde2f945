"""`make_plan`: the cuts of a model into stages, and what a step with them takes."""

from collections.abc import Sequence

import keras
import numpy as np

from tfdml.pipeline.cuts import cut_by_cost, cut_by_names, sent_tensors, stages_of
from tfdml.pipeline.layer_costs import CallCost, layer_costs
from tfdml.pipeline.layer_graph import LayerGraph, variables_of
from tfdml.pipeline.pipeline_plan import PipelinePlan, StagePlan
from tfdml.pipeline.schedule import max_in_flight
from tfdml.pipeline.slot_bytes import slot_bytes
from tfdml.tensor_memory.graph_nodes import variables_bytes

# What a cut is taken to cost: its tensors and their gradients, once each, at this rate. It only
# decides between cuts of nearly equal stages.
_BYTES_PER_SECOND = 10e9


def make_plan(
    model: keras.Model,
    batch_size: int,
    *,
    num_stages: int,
    num_microbatches: int,
    schedule: str,
    stages: Sequence[Sequence[str]] | None = None,
    memory_limits: float | Sequence[float] | None = None,
    costs: Sequence[CallCost] | None = None,
) -> PipelinePlan:
    """Cuts a model into stages, and predicts the times and the memory of a step.

    Args:
        model: A functional or Sequential model, built; compiled if its optimizer's slots count.
        batch_size: Rows of a step of one pipeline: those of a global batch that one group of
            devices gets.
        num_stages: The number of stages: of devices in a group.
        num_microbatches: The number of microbatches of a step.
        schedule: "1f1b" or "gpipe".
        stages: Names of the layers of each stage. None makes the slowest stage as fast as possible.
        memory_limits: Bytes that each stage may need, or one number for all: for weights,
            gradients, slots and activations. None for no limits.
        costs: The costs of the calls of `LayerGraph(model)`; measured by default.

    Raises:
        ValueError: If an argument is wrong, the model cannot be cut, or a layer not measured.
    """
    graph = LayerGraph(model)
    _check(batch_size, num_microbatches, num_stages, stages)
    limits = _limits(memory_limits, num_stages)
    rows = -(-batch_size // num_microbatches)
    costs = layer_costs(graph, rows) if costs is None else costs
    if len(costs) != len(graph.calls):
        raise ValueError(
            f"`costs` must have a cost for each of the model's calls. Received: {len(costs)}, for "
            f"{len(graph.calls)} calls."
        )
    in_flight = [
        max_in_flight(stage, num_stages, num_microbatches, schedule) for stage in range(num_stages)
    ]
    sizes = _Sizes(graph, costs, rows, getattr(model, "optimizer", None))
    if stages is None:
        cuts = cut_by_cost(
            [cost.forward + cost.backward for cost in costs],
            num_stages,
            None if limits is None else lambda s, b, e: sizes.of_range(b, e, in_flight[s]),
            limits,
            [2 * nbytes / _BYTES_PER_SECOND for nbytes in sizes.crossing],
            graph.names,
        )
        assignment = stages_of(cuts, len(costs))
    else:
        assignment = cut_by_names(graph, stages)
    return PipelinePlan(
        model.name,
        batch_size,
        num_microbatches,
        schedule,
        tuple(assignment),
        tuple(sizes.stage(s, assignment, in_flight[s]) for s in range(num_stages)),
        sizes.of_rows(-(-batch_size // num_stages)),
        limits,
    )


class _Sizes:
    """Bytes of a model's calls, and what they add up to in a stage.

    Args:
        graph: The calls.
        costs: Their costs.
        rows: Rows of a microbatch.
        optimizer: The model's optimizer, or None.

    Attributes:
        crossing: Bytes of a microbatch that a cut before each call separates from it and later
            ones.
    """

    def __init__(
        self,
        graph: LayerGraph,
        costs: Sequence[CallCost],
        rows: int,
        optimizer: keras.Optimizer | None,
    ):
        self._graph, self._costs, self._rows = graph, costs, rows
        owners = graph.owners()
        trained = [
            [v for v in variables_of(call, trainable=True) if owners[id(v)] == number]
            for number, call in enumerate(graph.calls)
        ]
        self._gradients = [variables_bytes(variables) for variables in trained]
        self._slots = slot_bytes(optimizer, trained)
        self._bytes_of = {
            id(tensor): rows * nbytes
            for call, cost in zip(graph.calls, costs, strict=True)
            for tensor, nbytes in zip(call.outputs, cost.output_bytes, strict=False)
        }
        self.crossing = [
            sum(self._bytes_of.get(id(tensor), 0.0) for tensor in graph.crossing(position))
            for position in range(len(costs))
        ]
        whole = zip(costs, self._gradients, self._slots, strict=True)
        self._state_before = np.cumsum([0, *(c.weight_bytes + g + s for c, g, s in whole)])
        self._kept_before = np.cumsum([0, *(rows * cost.kept_bytes for cost in costs)])

    def of_range(self, begin: int, end: int, in_flight: int) -> float:
        """Returns the bytes of a stage with the calls from `begin` up to `end`."""
        state = self._state_before[end] - self._state_before[begin]
        kept = self._kept_before[end] - self._kept_before[begin]
        return state + in_flight * (kept + self.crossing[begin])

    def of_rows(self, rows: int) -> int:
        """Returns the bytes of the whole model, with the activations of some rows."""
        return int(self._state_before[-1] + self._kept_before[-1] * rows / self._rows)

    def stage(self, stage: int, assignment: Sequence[int], in_flight: int) -> StagePlan:
        """Returns the plan of a stage.

        Args:
            stage: Its number.
            assignment: The stage of each call.
            in_flight: The microbatches whose activations it keeps at a time.
        """
        own = [number for number, of in enumerate(assignment) if of == stage]
        costs = [self._costs[number] for number in own]
        sends = sent_tensors(self._graph, assignment)
        sent = sum(self._bytes_of.get(id(s.tensor), 0.0) for s in sends if s.maker == stage)
        received = sum(self._bytes_of.get(id(s.tensor), 0.0) for s in sends if s.user == stage)
        kept = sum(self._rows * cost.kept_bytes for cost in costs)
        return StagePlan(
            tuple(dict.fromkeys(self._graph.names[number] for number in own)),
            sum(cost.forward for cost in costs),
            sum(cost.backward for cost in costs),
            sum(cost.weight_bytes for cost in costs),
            sum(self._gradients[number] for number in own),
            sum(self._slots[number] for number in own),
            int(in_flight * (kept + received)),
            int(sent),
            in_flight,
        )


def _check(
    batch_size: int,
    num_microbatches: int,
    num_stages: int,
    stages: Sequence[Sequence[str]] | None,
) -> None:
    for name, given in (("batch_size", batch_size), ("num_microbatches", num_microbatches)):
        if isinstance(given, bool) or not isinstance(given, int) or given < 1:
            raise ValueError(f"`{name}` must be a positive number. Received: {name}={given!r}.")
    if num_microbatches > batch_size:
        raise ValueError(
            f"Each microbatch needs a row. Received: batch_size={batch_size} and "
            f"num_microbatches={num_microbatches}. Use at most {batch_size} microbatches, or a "
            f"larger batch."
        )
    if stages is not None and len(stages) != num_stages:
        raise ValueError(
            f"`stages` must name the layers of each device of a group. Received: {len(stages)} "
            f"stages for num_stages={num_stages}. Name {num_stages}, or use {len(stages)} devices."
        )


def _limits(given: float | Sequence[float] | None, num_stages: int) -> tuple[float, ...] | None:
    """Returns the limit of each stage."""
    if given is None:
        return None
    limits = tuple(given) if isinstance(given, Sequence) else (given,) * num_stages
    if len(limits) != num_stages or not all(limit > 0 for limit in limits):
        raise ValueError(
            f"`memory_limits` must be a positive number of bytes, or one for each of the "
            f"{num_stages} stages. Received: memory_limits={given!r}. 16 GB are 16e9."
        )
    return limits
