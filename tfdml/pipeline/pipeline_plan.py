"""The result of planning a pipeline: its stages, the times of a step, a table and a picture."""

import dataclasses
import functools
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from tfdml.pipeline.schedule_times import WorkSpan, schedule_times
from tfdml.reports import columns, in_words, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Columns of the picture in text, and of lines.
_WIDTH, _LINE = 78, 100
# More microbatches have no room for their numbers.
_MOST_LABELS = 32
# Colours that colour-blind readers can distinguish (Okabe and Ito).
_COLOURS = {"forward": "#56B4E9", "backward": "#E69F00"}


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """What one stage holds and does.

    Attributes:
        layers: Names of its layers, in the order of their calls.
        forward: Seconds of its forward pass of a microbatch.
        backward: Seconds of its backward pass.
        weight_bytes: Bytes of its variables. One that several stages use is in the first.
        gradient_bytes: Bytes of its gradients, which are added up over the microbatches.
        slot_bytes: Bytes of the optimizer's variables for its weights.
        activation_bytes: Bytes that are kept for backward passes, of as many microbatches as the
            schedule lets the stage keep: with what it gets from other stages, without the losses.
        sent_bytes: Bytes of a microbatch that it sends to later stages, to each that uses them. The
            backward pass sends as many back.
        in_flight: Number of microbatches whose activations it keeps at a time.
    """

    layers: tuple[str, ...]
    forward: float
    backward: float
    weight_bytes: int
    gradient_bytes: int
    slot_bytes: int
    activation_bytes: int
    sent_bytes: int
    in_flight: int

    @property
    def memory(self) -> int:
        """Bytes of weights, gradients, slots and activations."""
        return self.weight_bytes + self.gradient_bytes + self.slot_bytes + self.activation_bytes


@dataclasses.dataclass(frozen=True)
class PipelinePlan:
    """A model's stages, and what a step takes with them. `str()` is a table.

    Times are those of the layers alone: without sending, losses and the update.

    Attributes:
        model: The model's name.
        batch_size: Rows of a step of the pipeline.
        num_microbatches: The number of microbatches.
        schedule: "1f1b" or "gpipe".
        assignment: The stage of each call of `LayerGraph(model)`.
        stages: The stages.
        data_parallel_memory: Bytes that each device would need with the whole model, and its part
            of the batch's rows.
        memory_limits: Bytes that each stage may need; None for no limits.
    """

    model: str
    batch_size: int
    num_microbatches: int
    schedule: str
    assignment: tuple[int, ...]
    stages: tuple[StagePlan, ...]
    data_parallel_memory: int
    memory_limits: tuple[float, ...] | None = None

    @functools.cached_property
    def spans(self) -> list[list[WorkSpan]]:
        """When each stage works, by the schedule."""
        forward = [stage.forward for stage in self.stages]
        backward = [stage.backward for stage in self.stages]
        return schedule_times(forward, backward, self.num_microbatches, self.schedule)

    @property
    def step_seconds(self) -> float:
        """Seconds of a step's forward and backward passes."""
        return max(spans[-1].end for spans in self.spans)

    @property
    def bubble(self) -> float:
        """Fraction of the devices' time in which they are idle."""
        available = self.step_seconds * len(self.stages)
        return 1 - self.one_device_seconds / available if available else 0.0

    @property
    def bubble_of_equal_stages(self) -> float:
        """The same if all stages took the same time: (p - 1) / (m + p - 1)."""
        return (len(self.stages) - 1) / (self.num_microbatches + len(self.stages) - 1)

    @property
    def one_device_seconds(self) -> float:
        """Seconds of the same microbatches on one device."""
        return self.num_microbatches * sum(s.forward + s.backward for s in self.stages)

    @property
    def speedup(self) -> float:
        """How many times as fast as one device."""
        return self.one_device_seconds / self.step_seconds if self.step_seconds else 1.0

    @property
    def data_parallel_seconds(self) -> float:
        """Seconds with the whole model on each device and a part of the rows.

        It is a fraction 1/p of `one_device_seconds`: the sum of gradients is not counted.
        """
        return self.one_device_seconds / len(self.stages)

    @property
    def data_parallel_fits(self) -> bool:
        """Whether `data_parallel_memory` is within all of the limits."""
        return self.memory_limits is None or self.data_parallel_memory <= min(self.memory_limits)

    @property
    def exchange_bytes(self) -> float:
        """Bytes that each device would send for the sum of gradients: 2 (p - 1) / p of them."""
        gradients = sum(stage.gradient_bytes for stage in self.stages)
        return 2 * (len(self.stages) - 1) / len(self.stages) * gradients

    def plot(self, path: str | Path | None = None) -> "Figure":
        """Draws when each stage works on which microbatch; returns the figure.

        Args:
            path: A file to write, of a format that matplotlib writes: .png, .svg, .pdf.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        figure = new_figure(10, 1.4 + 0.5 * len(self.stages))
        axes = figure.subplots()
        axes.set_facecolor("#eeeeee")
        for number, spans in enumerate(self.spans):
            for kind, colour in _COLOURS.items():
                own = [span for span in spans if span.task.kind == kind]
                bars = axes.barh(
                    [number] * len(own),
                    [1e3 * (span.end - span.begin) for span in own],
                    left=[1e3 * span.begin for span in own],
                    color=colour,
                    edgecolor="white",
                    linewidth=0.5,
                    label="" if number else f"{kind} pass",
                )
                if self.num_microbatches <= _MOST_LABELS:
                    numbers = [str(span.task.microbatch) for span in own]
                    axes.bar_label(bars, numbers, label_type="center", fontsize="small")
        axes.set_xlim(0, 1e3 * self.step_seconds or None)
        axes.set_yticks(range(len(self.stages)), [f"stage {n}" for n in range(len(self.stages))])
        axes.invert_yaxis()
        axes.set_xlabel("milliseconds")
        axes.set_title(
            f"{self.model}: {self.num_microbatches} microbatches, {self.schedule}, "
            f"{100 * self.bubble:.0f} % idle"
        )
        figure.legend(loc="outside right upper", frameon=False)
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure

    def __str__(self) -> str:
        title = (
            f"{self.model}, {self.batch_size} rows in {self.num_microbatches} microbatches, "
            f"{self.schedule}: {len(self.stages)} stages"
        )
        sentences = [self._times(), *self._over_limits(), self._advice()]
        return "\n".join(
            [title, "", *self._table(), "", *self._picture(), ""]
            + [line for sentence in sentences for line in textwrap.wrap(sentence, _LINE)]
        )

    def _table(self) -> list[str]:
        heads = ("stage", "layers", "forward", "backward", "weights", "gradients", "slots",
                 "activations", "sent")  # fmt: skip
        rows = [
            [
                str(number),
                _first_and_last(stage.layers),
                _in_ms(stage.forward),
                _in_ms(stage.backward),
                in_words(stage.weight_bytes),
                in_words(stage.gradient_bytes),
                in_words(stage.slot_bytes),
                f"{in_words(stage.activation_bytes)} ({stage.in_flight})",
                in_words(stage.sent_bytes),
            ]
            for number, stage in enumerate(self.stages)
        ]
        return [
            *columns(heads, rows, left=2),
            "Times and bytes sent are of a microbatch; in brackets, how many a stage keeps at a "
            "time.",
        ]

    def _picture(self) -> list[str]:
        """Returns the schedule in text."""
        lines = []
        for number, spans in enumerate(self.spans):
            cells = ["."] * _WIDTH
            for span in spans:
                begin, end = (
                    round(_WIDTH * t / self.step_seconds) if self.step_seconds else 0
                    for t in (span.begin, span.end)
                )
                first, letters = ("0", 10) if span.task.kind == "forward" else ("a", 26)
                sign = chr(ord(first) + span.task.microbatch % letters)
                cells[begin:end] = sign * (end - begin)
            lines.append(f"stage {number}  {''.join(cells)}")
        return [
            *lines,
            "Digits are forward passes, by microbatch; letters backward passes, a of microbatch 0; "
            "dots idle.",
        ]

    def _times(self) -> str:
        return (
            f"A step takes {_in_ms(self.step_seconds)}, {self.speedup:.2f} times as fast as the "
            f"same microbatches on one device ({_in_ms(self.one_device_seconds)}). The devices are "
            f"idle for {100 * self.bubble:.1f} % of it; if all stages took the same time, "
            f"(p - 1) / (m + p - 1) = {100 * self.bubble_of_equal_stages:.1f} %. Sending, losses "
            f"and the update are not counted."
        )

    def _over_limits(self) -> list[str]:
        return [
            f"Stage {number} needs {in_words(stage.memory)}, over its limit of "
            f"{in_words(int(limit))}."
            for number, (stage, limit) in enumerate(
                zip(self.stages, self.memory_limits or (), strict=bool(self.memory_limits))
            )
            if stage.memory > limit
        ]

    def _advice(self) -> str:
        count = len(self.stages)
        if count == 1:
            return "One stage is no pipeline."
        needs = (
            f"Data parallelism on the same {count} devices needs "
            f"{in_words(self.data_parallel_memory)} on each"
        )
        if not self.data_parallel_fits:
            return f"{needs}, more than the limit of {in_words(int(min(self.memory_limits)))}."
        left = self.step_seconds - self.data_parallel_seconds
        if not left > 0:
            return f"{needs}, and is not faster."
        fits = "which fits, and" if self.memory_limits else "and, if they have it,"
        return (
            f"{needs}, {fits} takes {_in_ms(self.data_parallel_seconds)} and the sum of gradients: "
            f"it is "
            f"faster if {in_words(int(self.exchange_bytes))} from and to each device take "
            f"less than {_in_ms(left)}, at {in_words(int(self.exchange_bytes / left))}/s or more."
        )


def _in_ms(seconds: float) -> str:
    milliseconds = 1e3 * seconds
    return f"{milliseconds:.0f} ms" if milliseconds >= 999.5 else f"{milliseconds:.3g} ms"


def _first_and_last(layers: tuple[str, ...]) -> str:
    if len(layers) <= 2:
        return ", ".join(layers)
    return f"{layers[0]} ... {layers[-1]} ({len(layers)})"
