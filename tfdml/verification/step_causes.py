"""Causes of a difference within a step whose rows are the same: layers, losses, gradients, rates.

Each function returns the cause that it recognises, or None.
"""

from collections.abc import Callable

import numpy as np

from tfdml.verification import record
from tfdml.verification.comparing import relative
from tfdml.verification.evidence import Cause, Evidence


def _batch_normalization(found: Evidence) -> Cause | None:
    normalizes = found.layer.get("normalizes") if found.kind == record.OUTPUT else None
    if normalizes is None:
        return None
    words = "BatchNormalization normalises the rows of each replica by themselves"
    if normalizes == record.WHOLE_BATCH:
        return Cause(
            "BatchNormalization",
            f"{words}, though it has `synchronized=True`: for an input like this one, such as one "
            f"with a mask, its moments are not summed over replicas.",
            "In a subclass, sum over replicas what `_moments` adds up over rows. If the layer is "
            "Keras's own, report it, and use LayerNormalization until then.",
        )
    return Cause(
        "BatchNormalization",
        f"{words}, not those of the whole batch.",
        "Make the layer with `synchronized=True`, or use a normalisation that does not depend on "
        "the batch, such as LayerNormalization.",
    )


def _random_layer(found: Evidence) -> Cause | None:
    if found.kind != record.OUTPUT or "draws" not in found.layer:
        return None
    is_dropout = "dropout" in found.layer["class"].lower()
    how = "by rank" if found.differs_by_rank else "without a seed"
    return Cause(
        "Dropout" if is_dropout else "random layer",
        f"The layer draws random numbers ({found.layer['draws']}) {how}: they are not the "
        f"same in both runs.",
        "Use `keras.layers.Dropout` or draw by `keras.random` with a `keras.random.SeedGenerator` "
        "that the layer owns, seeded alike on all ranks.",
    )


def _branch_on_rank(found: Evidence) -> Cause | None:
    if not found.differs_by_rank:
        return None
    ranks = ", ".join(map(str, found.first.replicas))
    return Cause(
        "branch on rank",
        f"Replica 0 computes what one process does, and others do not ({ranks}): the code depends "
        f"on the rank.",
        "Compute the same on all ranks. Under `if strategy.is_chief:` only write files and print.",
    )


def _batch_size_layer(found: Evidence) -> Cause | None:
    if found.kind != record.OUTPUT:
        return None
    return Cause(
        "batch-size layer",
        f"The layer ({found.layer.get('class', 'unknown')}) gets the same rows and returns others: "
        f"a row's output depends on the number of rows, or on the other rows, and a replica has "
        f"its own rows only.",
        "Compute each row by itself. In a step, `tf.distribute.get_replica_context().all_reduce` "
        "sums over replicas what needs the whole batch.",
    )


def _summed_loss(found: Evidence) -> Cause | None:
    numbers = found.numbers() if found.kind == record.LOSS else None
    if numbers is None:
        return None
    reference, own = numbers
    if relative(np.array([sum(own)]), np.array([reference])) > max(found.first.rounding, 1e-5):
        return None
    return Cause(
        "summed loss",
        f"The loss is a sum over the rows: each replica adds up its own, and the mean over "
        f"{len(own)} replicas is taken of what should be added.",
        "Return one value for each row, and let Keras reduce them: "
        '`compile(loss=keras.losses.MeanSquaredError(reduction="sum"))`, or a loss function '
        "without `sum`. A scalar must be a mean over the rows.",
    )


def _repeated_rows(found: Evidence) -> Cause | None:
    if not found.only_tables_of_repeated_rows_differ:
        return None
    words = f"The batch looks up rows of `{found.name}` several times. "
    if found.kind == record.GRADIENT:
        words += (
            "Their gradient is not the sum of its parts: code before the optimizer counts, scales "
            "or clips the parts on each replica, which has only some of them."
        )
    else:
        words += (
            "The parts of their gradient add up to that of one process, but each part is used by "
            "itself, as by an optimizer that squares it."
        )
    return Cause(
        "repeated embedding rows",
        words,
        "Add up the parts of each row before anything but a sum is computed of them: pass the "
        "gradients to the optimizer as the tape gives them, and let it clip them.",
    )


def _rate_by_size(found: Evidence) -> Cause | None:
    numbers = found.numbers() if found.kind == record.RATE else None
    if numbers is None:
        return None
    (reference, own), size = numbers, found.number_of_replicas
    if not np.allclose(own, np.multiply(reference, size), rtol=1e-5):
        return None
    return Cause(
        "rate multiplied by size",
        f"The learning rate is {own[0]:.6g} on {size} replicas, {size} times the {reference:.6g} "
        f"of one: but the global batch is the same.",
        "Leave the factor out. Scale the rate by the batch size if you change that: "
        "`tfdml.schedules.scale_learning_rate`.",
    )


def _other_model(found: Evidence) -> Cause | None:
    if found.kind != record.WEIGHT or found.first.key[0] >= 0:
        return None
    return Cause(
        "other model",
        "The model has other weights before the first step: its shape depends on the rank or on "
        "the number of processes.",
        "Build the same model on any number of processes.",
    )


# The cause of a difference of a kind in which nothing more is recognised.
_OF_KINDS = {
    record.LOSS: Cause(
        "loss of the batch",
        "The layers return the same, but not the loss: it depends on the number of rows, on the "
        "rank, or on rows of other replicas.",
        "Return one value for each row from the loss function, or a mean over the rows.",
    ),
    record.GRADIENT: Cause(
        "gradient of a replica",
        "Outputs and losses are the same, but not the gradients that replicas add up: code between "
        "the loss and the optimizer changes each replica's own, such as clipping or a factor of "
        "the number of rows.",
        "Pass the gradients of the mean loss to the optimizer as they are, and clip by the "
        "optimizer's `clipnorm` or `global_clipnorm`, which apply after the sum.",
    ),
    record.SUM: Cause(
        "exchange",
        "Replicas' gradients add up to those of one process, but the exchange returns others.",
        "Report it: the exchange must return the sum.",
    ),
    record.RATE: Cause(
        "rate by size",
        "The learning rate depends on the number of processes.",
        "Use the same rate and the same schedule on any number of processes.",
    ),
    record.WEIGHT: Cause(
        "update",
        "Gradients and learning rate are the same, but not the weights: another setting of the "
        "optimizer, a callback or the train step depends on the number of processes.",
        "Use the same optimizer on any number of processes, and change weights on all ranks alike.",
    ),
    record.METRIC: Cause(
        "metric",
        "The weights are the same, but not a metric: it is not a sum or a mean over rows.",
        "Keep what `update_state` adds up over rows in variables, and compute the result from "
        "these sums in `result`.",
    ),
}


def _of_kind(found: Evidence) -> Cause | None:
    return _OF_KINDS.get(found.kind)


STEP_CAUSES: tuple[Callable[[Evidence], Cause | None], ...] = (
    _batch_normalization,
    _random_layer,
    _branch_on_rank,
    _batch_size_layer,
    _summed_loss,
    _repeated_rows,
    _rate_by_size,
    _other_model,
    _of_kind,
)
