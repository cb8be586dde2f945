"""Implementation of `tfdml serve`: TensorFlow's server for a worker or parameter server."""

import os
import sys

from tfdml import topology
from tfdml.runtime.immediate_exit import EXIT_CODE
from tfdml.runtime.servers.server_link import ChiefLost, follow_chief
from tfdml.runtime.servers.server_task import CHIEF, ServerTask


def serve(task: ServerTask, start_limit: float, silence_limit: float) -> int:
    """Serves the chief until it is done or lost.

    Args:
        task: Task of this process: a worker or a parameter server.
        start_limit: Seconds to wait for the chief to start.
        silence_limit: Seconds without a message after which the chief counts as lost.

    Returns:
        Exit code: 0 when the chief is done, 70 when it is lost or has failed.

    Raises:
        ValueError: If the task is the chief's.
        OSError: If this task's port is taken.
    """
    if task.role == CHIEF:
        raise ValueError(
            "`tfdml serve` must run as a worker or parameter server. Received: the chief's task. "
            "Run the training script there."
        )
    import tensorflow as tf

    from tfdml.runtime.gpus import server_config
    from tfdml.runtime.servers.table_service import offer_service

    offer_service()
    gpus = tf.config.list_physical_devices("GPU")
    try:
        # The server runs as long as this reference exists.
        running = tf.distribute.Server(
            tf.train.ClusterSpec(task.cluster),
            job_name=task.role,
            task_index=task.index,
            config=server_config(task.role, topology.on_this_host(), len(gpus)),
        )
    except tf.errors.OpError as error:
        raise OSError(
            f"The port of every task must be free on its machine. Received for {task.name}: "
            f"{task.address}: {error.message}. Stop the program that listens there, or choose "
            f"another port."
        ) from error
    print(f"tfdml serve: {task.name} serves {running.target}.", file=sys.stderr, flush=True)
    try:
        follow_chief(task, start_limit, silence_limit)
    except ChiefLost as error:
        print(f"tfdml serve: {task.name} ends, because {error}.", file=sys.stderr, flush=True)
        return EXIT_CODE
    print(f"tfdml serve: {task.name} ends, because the chief is done.", file=sys.stderr, flush=True)
    return 0


def leave(code: int) -> None:
    """Ends this process immediately: TensorFlow's server has no orderly shutdown."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
