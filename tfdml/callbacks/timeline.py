"""Timeline of chosen steps: what each rank did when, in one file a rank."""

import socket
from pathlib import Path

import keras
from rich.console import Console

from tfdml.runtime.timing.time_recorder import TimeRecorder
from tfdml.strategies import keras_seam
from tfdml.timeline.rank_timeline import Clock, RankTimeline
from tfdml.timeline.recording import Recording


class Timeline(keras.callbacks.Callback):
    """Records what each rank does in some steps, for `tfdml timeline` and viewers of traces.

    ```python
    model.fit(dataset, callbacks=[tfdml.callbacks.Timeline("run1/timeline")])
    ```

    Each rank writes a file of its own into the directory: when it waited for data, computed,
    encoded, exchanged and decoded each bucket of gradients, updated the weights, and ran callbacks
    and saves. `tfdml timeline run1/timeline` merges the files of all ranks on one clock, shows how
    much of the exchange was hidden behind computing, who waited for whom and how long the network
    was idle, and writes a trace for Perfetto or chrome://tracing. On hosts without a common
    directory, copy the files into one.

    The chosen steps run in a graph of their own, which computes the same bits. It is traced and
    optimized in the execution before them; all other steps have the graph that they have without
    this callback. Times are read on the processor: work of a GPU is only queued at these points.
    With `steps_per_execution`, whole executions are recorded, and only the first step of each shows
    a wait for data. The file is written before the step after the chosen ones, or at the end of
    the `fit`; it replaces that of an earlier `fit`.

    With `local_updates`, a whole round of steps runs in such graphs before the chosen ones, and a
    synchronization belongs to the step before it. One at an epoch's end shows no exchanges.

    On one process nothing is exchanged: there it says so and records nothing, and
    `keras.callbacks.TensorBoard(profile_batch=...)` shows what the process does.

    Args:
        log_dir: Directory for the files of all ranks.
        profile_batch: Numbers of the first and the last batch in the `fit`, from 1, both included
            as in `keras.callbacks.TensorBoard`; or the number of one batch. A `fit` that resumes
            counts from where it resumes.

    Raises:
        ValueError: If `profile_batch` is wrong; or, in `fit`, if the model's strategy is not a
            synchronous one of tfdml, or the job is elastic.
    """

    def __init__(
        self, log_dir: str | Path, profile_batch: tuple[int, int] | list[int] | int = (100, 110)
    ):
        super().__init__()
        self._log_dir = Path(log_dir)
        self._first, self._last = _checked(profile_batch)
        self._recorder: TimeRecorder | None = None
        self._clocks: list[Clock] = []
        self._job = ""
        keras_seam.install()

    def set_model(self, model: keras.Model) -> None:
        """Finds this process's recorder."""
        super().set_model(model)
        strategy = model.distribute_strategy
        _check_strategy(strategy)
        extended = strategy.extended
        self._recorder = None if extended.guard is None else extended.recorder

    def on_train_begin(self, logs=None):
        """Chooses the steps."""
        if self._recorder is None:
            Console(highlight=False).print(
                "Timeline: one process exchanges nothing, so no timeline is recorded. "
                "keras.callbacks.TensorBoard(profile_batch=...) shows what it does."
            )
            return
        guard = self.model.distribute_strategy.extended.guard
        self._job, self._clocks = f"{guard.job}, call {guard.activity.calls}", []
        self._recorder.choose(self._first, self._last, self._read_clock, self._save)

    def on_train_end(self, logs=None):
        """Writes the file, if the `fit` has ended within the chosen steps."""
        if self._recorder is not None:
            self._recorder.close()

    def get_state(self) -> dict:
        """Returns an empty state, because spans are not kept: a resumed `fit` may record anew."""
        return {}

    def set_state(self, state: dict) -> None:
        """Restores nothing."""

    def _read_clock(self) -> None:
        """Measures the difference from rank 0's clock."""
        reading = self.model.distribute_strategy.extended.guard.read_clock()
        if reading is not None:
            self._clocks.append(Clock(*reading))

    def _save(self, recording: Recording) -> None:
        """Writes this rank's file."""
        self._read_clock()
        strategy = self.model.distribute_strategy
        RankTimeline(
            rank=strategy.rank,
            size=strategy.size,
            host=socket.gethostname(),
            job=self._job,
            strategy=type(strategy).__name__,
            clocks=self._clocks,
            spans=recording.all_spans(),
        ).save(self._log_dir)


def _checked(profile_batch: tuple[int, int] | list[int] | int) -> tuple[int, int]:
    """Returns the numbers of the first and the last batch."""
    both = [profile_batch] * 2 if isinstance(profile_batch, int) else list(profile_batch)
    if len(both) != 2 or any(type(n) is not int for n in both) or not 1 <= both[0] <= both[1]:
        raise ValueError(
            f"`profile_batch` must be the numbers of the first and the last batch, from 1, or one "
            f"number. Received: profile_batch={profile_batch!r}. Use for example (100, 110)."
        )
    return both[0], both[1]


def _check_strategy(strategy: object) -> None:
    """Refuses strategies whose ranks exchange nothing with each other, and elastic jobs."""
    extended = getattr(strategy, "extended", None)
    if not hasattr(extended, "recorder"):
        received = "no strategy" if strategy is None else f"a {type(strategy).__name__}"
        raise ValueError(
            f"`Timeline` must be used with a model made in the scope of a synchronous strategy of "
            f"tfdml, whose ranks exchange gradients or weights. Received: {received}. Leave the "
            f"callback out; on parameter servers, `keras.callbacks.TensorBoard(profile_batch=...)` "
            f"shows the chief."
        )
    if extended.collective.size > 1 and extended.guard is None:
        raise ValueError(
            f"`Timeline` must not be used in an elastic job, whose ranks change. Received: rank "
            f"{extended.collective.rank} of {extended.collective.size} in `tfdml.elastic.run`. "
            f"Record the timeline without --min-np."
        )
