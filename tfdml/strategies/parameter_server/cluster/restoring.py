"""Restoration of lost parameter servers within a job, whose workers and other servers go on."""

import itertools
import sys
import time
from collections.abc import Iterable

import keras
import tensorflow as tf

from tfdml.runtime.servers.server_link import ServerLink
from tfdml.runtime.servers.server_task import SERVER, WORKER, name_of
from tfdml.strategies.parameter_server.extended import connect_again
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
    link = strategy.connection.link
    if not has_checkpoint:
        _say(
            f"{_names(link.lost_indices(SERVER))} cannot be restored, because this `fit` has no "
            f"complete checkpoint of a `FaultTolerantCheckpoint`."
        )
        return False
    returned: set[int] = set()
    # Others may be lost while these are made again, all of which then begins again.
    while lost := link.lost_indices(SERVER):
        if not _is_all_saved(strategy.extended.variables_on(lost), model):
            return False
        if not _have_returned(strategy, returned):
            return False
        try:
            if not _are_connected(strategy, returned):
                return False
            # Those of more servers than above, if others were lost meanwhile.
            gone = strategy.extended.gone_variables()
            if not _is_all_saved(gone, model):
                return False
            strategy.extended.make_again(gone)
            # Callbacks may have changed a learning rate on a server that was not lost.
            strategy.extended.reset_scalars(_saved_variables(model))
        except tf.errors.OpError:
            if not link.wait_for_loss(SERVER):
                raise
    # They were traced with the variables that are lost.
    model.train_function = model.test_function = model.predict_function = None
    _say(
        "all variables are restored from the newest checkpoint, and the steps since then are "
        "taken again."
    )
    return True


def _have_returned(strategy: tf.distribute.Strategy, returned: set[int]) -> bool:
    """Waits until lost servers have been started again, and adds them to `returned`.

    Returns:
        Whether they are; a message says which one is not.
    """
    link, limit = strategy.connection.link, strategy.restart_limit
    names = _names(link.lost_indices(SERVER))
    _say(f"fit waits for up to {limit:g} s until {names} has been started again.")
    found = link.wait_for_return(SERVER, limit)
    if not found:
        names = _names(link.missing_indices(SERVER))
        _say(f"{names} has not been started again within `restart_limit`, {limit:g} s.")
    returned.update(found)
    return bool(found)


def _are_connected(strategy: tf.distribute.Strategy, servers: Iterable[int]) -> bool:
    """Connects the chief and the workers to servers that have been started again.

    Returns:
        Whether they are connected, unless a server is lost again; a message says who is not.

    Raises:
        tf.errors.OpError: If a server is lost again.
    """
    link, limit = strategy.connection.link, strategy.restart_limit
    absent = link.lost_indices(WORKER)
    if not connect_again(strategy.coordinator, absent, limit):
        _say(f"the chief does not reach {_names(servers)} again.")
        return False
    present = sorted(set(range(strategy.size)) - set(absent))
    for worker, server in itertools.product(present, servers):
        if not _is_reached(worker, server, link, limit):
            _say(f"{name_of(WORKER, worker)} does not reach {name_of(SERVER, server)} again.")
            return False
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


def _is_reached(worker: int, server: int, link: ServerLink, seconds: float) -> bool:
    """Waits until a worker reaches a server that has been started again: it tries now and then.

    Returns:
        Whether it does within `seconds`, unless one of both is lost.
    """

    @tf.function
    def reach() -> tf.Tensor:
        with tf.device(f"/job:{SERVER}/replica:0/task:{server}/device:CPU:0"):
            return tf.identity(tf.random.uniform([]))

    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if worker in link.lost_indices(WORKER) or server in link.lost_indices(SERVER):
            return True
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


def _names(servers: Iterable[int]) -> str:
    return ", ".join(name_of(SERVER, index) for index in servers)


def _say(text: str) -> None:
    print(f"tfdml: {text}", file=sys.stderr, flush=True)
