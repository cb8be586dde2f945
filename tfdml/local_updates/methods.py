"""`LocalSGD` and `DiLoCo`: how ranks train on their own, and what they agree on now and then."""

from typing import Any

import keras

from tfdml.local_updates.sync_rules import SyncRule, get_rule


class LocalUpdates:
    """Base class of methods by which ranks take steps of their own between synchronizations.

    Args:
        sync_every: Steps between synchronizations; see the subclasses.
        outer_optimizer: Keras optimizer of the common weights, its name or its serialized form.
            Each model gets a copy of it.
        num_fragments: Number of parts of the model that are synchronized in turn.
        warmup_steps: Number of synchronous steps at the beginning.
        average_slots: Whether synchronizations average the inner optimizer's slots.
        synchronous_hosts: Whether the ranks of a host take each step together.

    Raises:
        ValueError: If an argument is wrong.
    """

    def __init__(
        self,
        sync_every: int | str | SyncRule,
        outer_optimizer: keras.Optimizer | dict | str,
        num_fragments: int,
        warmup_steps: int,
        average_slots: bool,
        synchronous_hosts: bool,
    ):
        self.rule = get_rule(sync_every)
        self.sync_every = sync_every
        if type(num_fragments) is not int or num_fragments < 1:
            raise ValueError(
                f"`num_fragments` must be a positive integer. Received: "
                f"num_fragments={num_fragments!r}."
            )
        if type(warmup_steps) is not int or warmup_steps < 0:
            raise ValueError(
                f"`warmup_steps` must be a number of steps, 0 or more. Received: "
                f"warmup_steps={warmup_steps!r}."
            )
        for name, value in (
            ("average_slots", average_slots),
            ("synchronous_hosts", synchronous_hosts),
        ):
            if not isinstance(value, bool):
                raise ValueError(f"`{name}` must be True or False. Received: {name}={value!r}.")
        self.num_fragments = num_fragments
        self.warmup_steps = warmup_steps
        self.average_slots = average_slots
        self.synchronous_hosts = synchronous_hosts
        self._outer = _serialized(outer_optimizer)

    # Whether one process gets the weights of training without local updates.
    is_plain_on_one_process = False

    def make_outer_optimizer(self) -> keras.Optimizer:
        """Returns a new copy of the outer optimizer."""
        return keras.optimizers.get(self._outer)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor, by name."""
        return {
            "sync_every": self.sync_every,
            "warmup_steps": self.warmup_steps,
            "average_slots": self.average_slots,
            "synchronous_hosts": self.synchronous_hosts,
        }

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.get_config().items())
        return f"{type(self).__name__}({arguments})"


class LocalSGD(LocalUpdates):
    """Local SGD: each rank trains on its own, then all get the mean of their weights.

    ```python
    strategy = tfdml.HorovodStrategy(local_updates=tfdml.local_updates.LocalSGD(sync_every=16))
    ```

    A local step is the step of a job of one process on its part of the global batch. At a
    synchronization, what each rank's weights have moved by is weighted by its rows, and summed by
    the exchange that the strategy has for gradients: in buckets, and compressed with error feedback
    if it has a compressor. Nothing else is sent in between. An epoch ends with a synchronization.

    Args:
        sync_every: Steps between synchronizations: a number; "auto", which measures the link and
            lets synchronizations take a tenth of the time; or a rule, such as
            `QuadraticSyncRule(alpha=0.02)`. With several steps per execution, a synchronization
            waits for the execution's end.
        warmup_steps: Number of synchronous steps at the beginning. With half of all steps, this is
            post-local SGD.
        average_slots: Whether synchronizations average the slots of the model's optimizer, too.
            They are sent uncompressed. By default each rank keeps its own.
        synchronous_hosts: Whether the ranks of a host take each step together, on their rows of the
            batch: then hosts take steps of their own, not ranks. Gradients are summed within the
            host, uncompressed. For `MultiWorkerMirroredStrategy`.

    Raises:
        ValueError: If an argument is wrong.

    Reference:
        Stich, "Local SGD Converges Fast and Communicates Little", arXiv:1805.09767; Lin et al.,
        "Don't Use Large Mini-Batches, Use Local SGD", arXiv:1808.07217.
    """

    is_plain_on_one_process = True

    def __init__(
        self,
        sync_every: int | str | SyncRule = 16,
        *,
        warmup_steps: int = 0,
        average_slots: bool = False,
        synchronous_hosts: bool = False,
    ):
        outer = _sgd(learning_rate=1.0)
        super().__init__(sync_every, outer, 1, warmup_steps, average_slots, synchronous_hosts)


class DiLoCo(LocalUpdates):
    """DiLoCo: like `LocalSGD`, but an outer optimizer applies the mean of the ranks' moves.

    ```python
    strategy = tfdml.HorovodStrategy(
        compression="int4", local_updates=tfdml.local_updates.DiLoCo(sync_every=100)
    )
    ```

    What each rank's weights have moved by since the last synchronization is a pseudo-gradient. Its
    mean over ranks, weighted by their rows, goes to the outer optimizer, which updates the common
    weights. With fragments, parts of the model take turns, so that less is sent at once (Streaming
    DiLoCo, without overlap).

    Args:
        sync_every: Steps between synchronizations (of a fragment); see `LocalSGD`.
        outer_optimizer: Optimizer of the common weights: any of Keras's. By default
            `SGD(0.7, momentum=0.9, nesterov=True)`. To make an optimizer is an operation of
            TensorFlow, before which a `MultiWorkerMirroredStrategy` must exist: for that one give
            what `keras.optimizers.serialize` returns, such as
            `{"class_name": "SGD", "config": {"learning_rate": 0.7}}`.
        num_fragments: Number of parts of the model that are synchronized in turn, each every
            `sync_every` steps.
        warmup_steps: Number of synchronous steps at the beginning.
        average_slots: Whether synchronizations average the slots of the model's optimizer, too.
        synchronous_hosts: Whether the ranks of a host take each step together; see `LocalSGD`.

    Raises:
        ValueError: If an argument is wrong.

    Reference:
        Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models",
        arXiv:2311.08105; "Streaming DiLoCo with overlapping communication", arXiv:2501.18512.
    """

    def __init__(
        self,
        sync_every: int | str | SyncRule = 100,
        outer_optimizer: keras.Optimizer | dict | str | None = None,
        num_fragments: int = 1,
        *,
        warmup_steps: int = 0,
        average_slots: bool = False,
        synchronous_hosts: bool = False,
    ):
        if outer_optimizer is None:
            outer_optimizer = _sgd(learning_rate=0.7, momentum=0.9, nesterov=True)
        super().__init__(
            sync_every,
            outer_optimizer,
            num_fragments,
            warmup_steps,
            average_slots,
            synchronous_hosts,
        )

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor, by name."""
        own = {"outer_optimizer": self._outer, "num_fragments": self.num_fragments}
        return {**super().get_config(), **own}


def _sgd(**config: Any) -> dict[str, Any]:
    """Returns a serialized SGD, which needs no operation of TensorFlow."""
    return {"class_name": "SGD", "config": config}


def _serialized(optimizer: keras.Optimizer | dict | str) -> dict | str:
    """Returns the serialized form of the argument `outer_optimizer`.

    Raises:
        ValueError: If it is something else, or has options that belong to the inner optimizer.
    """
    given = optimizer
    if isinstance(optimizer, keras.Optimizer):
        given = keras.optimizers.serialize(optimizer)
    if not isinstance(given, dict | str):
        raise ValueError(
            f"`outer_optimizer` must be a Keras optimizer, its name or its serialized form. "
            f"Received: outer_optimizer={optimizer!r}. Use for example "
            f"keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True), the default."
        )
    config = given.get("config", {}) if isinstance(given, dict) else {}
    for name in ("gradient_accumulation_steps", "use_ema"):
        if config.get(name):
            raise ValueError(
                f"`outer_optimizer` must not have `{name}`, which belongs to the model's "
                f"optimizer. Received: {name}={config[name]!r}."
            )
    return given
