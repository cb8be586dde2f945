"""One rank of a pool: waits for cases and answers them."""

import importlib
import os
import random
import traceback
from multiprocessing.connection import Client

# Of each process: two replicas of two stages. A mirrored job has as many as its size.
LOGICAL_CPUS = 4


def main(address: str) -> None:
    """Serves the cases that arrive on a pool's socket until the pool closes it."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf

    mirrored = os.environ["TFDML_TEST_KIND"] == "mirrored"
    cpus_wanted = int(os.environ["TFDML_TEST_SIZE"]) if mirrored else LOGICAL_CPUS
    cpus = tf.config.list_physical_devices("CPU")
    logical = [tf.config.LogicalDeviceConfiguration() for _ in range(cpus_wanted)]
    tf.config.set_logical_device_configuration(cpus[0], logical)
    tf.config.threading.set_intra_op_parallelism_threads(1)

    from tests.harness import rank_job

    if rank_job.KIND == "multi_worker":
        rank_job.strategy()  # TensorFlow starts its server before its first operation.
    key = bytes.fromhex(os.environ["TFDML_TEST_KEY"])
    with Client(address, "AF_UNIX", authkey=key) as pool:
        pool.send(rank_job.rank())
        while True:
            try:
                module, function, args = pool.recv()
            except EOFError:
                # The pool is gone: exit at once, whatever other threads are doing.
                os._exit(0)
            pool.send(_answer(module, function, args))


def _answer(module: str, function: str, args: tuple) -> tuple[bool, object]:
    import keras

    keras.backend.clear_session()
    keras.config.set_dtype_policy("float32")
    keras.backend.set_floatx("float32")
    keras.utils.set_random_seed(random.randrange(2**31))
    try:
        return True, getattr(importlib.import_module(module), function)(*args)
    except Exception:  # noqa: BLE001 (an error of the case is its answer)
        return False, traceback.format_exc()
