"""Restoration of lost parameter servers within a job, whose workers and other servers go on."""

import sys
import time

import keras
import tensorflow as tf

from tfdml.runtime.servers.server_task import SERVER, WORKER, name_of
from tfdml.strategies.parameter_server.partition import is_partitioned, parts_of
from tfdml.strategies.replicas.rank_state import optimizers_of

_POLL_SECONDS = 0.2


def restored_servers(
    strategy: tf.distribute.Strategy, model: keras.Model, has_checkpoint: bool
) -> bool:
    """Waits until lost servers have been started again, and makes their variables again.

    The variables have no values then: a checkpoint has to be restored.

    Args:
        strategy: Strategy of the model.
        model: The model, to which all variables on the lost servers must belong.
        has_checkpoint: Whether the `fit` has a complete checkpoint.

    Returns:
        Whether the servers are back; a message says why not.
    """
    link, extended = strategy.connection.link, strategy.extended
    lost = link.lost_indices(SERVER)
    names = ", ".join(name_of(SERVER, index) for index in lost)
    if not has_checkpoint:
        _say(
            f"{names} cannot be restored, because this `fit` has no complete checkpoint of a "
            f"`FaultTolerantCheckpoint`."
        )
        return False
    if not _is_all_saved(extended.variables_on(lost), model):
        return False
    limit = strategy.restart_limit
    _say(f"fit waits for up to {limit:g} s until {names} has been started again.")
    # More than those above, if others are lost meanwhile.
    returned = link.wait_for_return(SERVER, limit)
    if not returned:
        _say(f"{names} has not been started again within `restart_limit`, {limit:g} s.")
        return False
    variables = extended.variables_on(returned)
    if not _is_all_saved(variables, model):
        return False
    extended.make_again(variables, strategy.coordinator)
    for worker in set(range(strategy.size)) - set(link.lost_indices(WORKER)):
        for server in returned:
            if not _is_connected(worker, server, limit):
                _say(f"{name_of(WORKER, worker)} does not reach {name_of(SERVER, server)} again.")
                return False
    # They were traced with the variables that are lost.
    model.train_function = model.test_function = model.predict_function = None
    _say(
        "all variables are restored from the newest checkpoint, and the steps since then are "
        "taken again."
    )
    return True


def _is_all_saved(variables: list[tf.Variable], model: keras.Model) -> bool:
    """Returns whether checkpoints of a model have all of some variables; says which one not."""
    saved = {id(v.handle) for v in _saved_variables(model)}
    others = [v.name for v in variables if id(v.handle) not in saved]
    if others:
        _say(
            f"`fit` ends, because a lost server had a variable that is in no checkpoint of this "
            f"model: {others[0]}."
        )
    return not others


def _is_connected(worker: int, server: int, seconds: float) -> bool:
    """Waits until a worker reaches a server that has been started again: it tries now and then.

    Returns:
        Whether it does within `seconds`.
    """

    @tf.function
    def reach() -> tf.Tensor:
        with tf.device(f"/job:{SERVER}/replica:0/task:{server}/device:CPU:0"):
            return tf.identity(tf.random.uniform([]))

    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            with tf.device(f"/job:{WORKER}/replica:0/task:{worker}/device:CPU:0"):
                reach()
            return True
        except (tf.errors.UnavailableError, tf.errors.CancelledError):
            time.sleep(_POLL_SECONDS)
    return False


def _saved_variables(model: keras.Model) -> list[tf.Variable]:
    """Returns the variables that a checkpoint of a model has, each part by itself."""
    variables = [*model.variables, *model.metrics_variables]
    for optimizer in optimizers_of(model):
        variables += optimizer.variables
    return [part._value for v in variables for part in (parts_of(v) if is_partitioned(v) else [v])]


def _say(text: str) -> None:
    print(f"tfdml: {text}", file=sys.stderr, flush=True)
