"""Process of a run of Keras's tests: runs pytest with every test in the scope of the strategy.

Its input is the JSON file named by KERAS_SUITE. It writes a line to its own file in the same
directory whenever a test begins or ends, so the watching process knows its position even if it
dies.
"""

import json
import os
import sys
import time
import types
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest


class Scope:
    """Scope of the strategy, entered for all of Keras's tests.

    Args:
        kind: "mirrored", "horovod" or "multi_worker".
        replicas: Number of replicas of the job.
    """

    def __init__(self, kind: str, replicas: int):
        import tensorflow as tf

        import tfdml

        if kind == "mirrored":
            (cpu,) = tf.config.list_physical_devices("CPU")
            logical = [tf.config.LogicalDeviceConfiguration() for _ in range(replicas)]
            tf.config.set_logical_device_configuration(cpu, logical)
            self.strategy = tfdml.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
        elif kind == "horovod":
            self.strategy = tfdml.HorovodStrategy()
        else:
            self.strategy = tfdml.MultiWorkerMirroredStrategy()
        self._entered: list = []
        self.enter()

    def is_entered(self) -> bool:
        """Returns whether the scope is entered."""
        import tensorflow as tf

        return tf.distribute.get_strategy() is self.strategy

    def enter(self) -> None:
        """Enters the scope, if it is not entered already."""
        import tensorflow as tf

        if not tf.distribute.has_strategy():
            scope = self.strategy.scope()
            scope.__enter__()
            # Keeps a reference: Python would leave a scope that is garbage collected.
            self._entered.append(scope)


class Recorder:
    """Pytest plugin that records the start and outcome of each test, and enters the scope.

    Args:
        directory: Directory of the ranks' files.
        rank: This rank, which has its own file.
        ranks: Number of ranks.
        scope: Scope to enter before each test, or None.
        done: Tests to skip.
    """

    def __init__(self, directory: Path, rank: int, ranks: int, scope: Scope | None, done: set[str]):
        self._lines = (directory / f"rank_{rank}.jsonl").open("a", buffering=1)
        self._directory, self._rank, self._ranks = directory, rank, ranks
        self._scope = scope
        self._done = done
        self._number = 0
        self._outcome, self._message = "passed", ""

    def _note(self, **fields: Any) -> None:
        self._lines.write(json.dumps(fields) + "\n")

    def pytest_configure(self, config: pytest.Config) -> None:
        """Registers the marks of Keras's tests."""
        for mark in ("requires_trainable_backend", "multi_device"):
            config.addinivalue_line("markers", f"{mark}: Keras's")

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list) -> None:
        """Removes the tests that are done."""
        del config
        items[:] = [item for item in items if item.nodeid not in self._done]
        self._note(collected=len(items))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Records files that cannot be imported."""
        if report.failed:
            self._note(test=report.nodeid, begins=True)
            self._note(test=report.nodeid, outcome="failed", message=str(report.longrepr)[-4000:])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Records the start of a test."""
        self._outcome, self._message = "passed", ""
        self._note(test=nodeid, begins=True)
        self._meet()

    def _meet(self) -> None:
        """Waits for all ranks, so that one rank's actions in a test do not affect the next test."""
        self._number += 1
        marks = [self._directory / f"{self._number}_{rank}" for rank in range(self._ranks)]
        marks[self._rank].touch()
        while not all(mark.exists() for mark in marks):
            time.sleep(0.01)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Enters the scope; ranks draw the same random numbers, as they make the same data."""
        import keras

        keras.utils.set_random_seed(zlib.crc32(item.nodeid.encode()))
        if self._scope is not None:
            self._scope.enter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remembers the worst outcome of a test's parts."""
        if report.failed:
            self._outcome, self._message = "failed", str(report.longrepr)[-4000:]
        elif report.skipped and self._outcome == "passed":
            self._outcome = "skipped"

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Records the outcome of a test, and whether it was in the scope to its end."""
        if self._scope is not None and not self._scope.is_entered():
            self._outcome, self._message = "failed", "The test has left the strategy's scope."
        self._note(test=nodeid, outcome=self._outcome, message=self._message)


def provide_conftest() -> None:
    """Creates the module that some tests import, which Keras's wheel does not contain."""
    import keras

    def skip_if_backend(backend: str, reason: str) -> pytest.MarkDecorator:
        return pytest.mark.skipif(keras.backend.backend() == backend, reason=reason)

    module = types.ModuleType("conftest")
    module.skip_if_backend = skip_if_backend
    sys.modules["conftest"] = module


def share_files(directory: Path, strategy: Any) -> None:
    """Gives all ranks the same directory and the same data, as the programs of a job have.

    Only rank 0 writes the callbacks' files: the other ranks look for them when it has left `fit`.

    Args:
        directory: Parent directory of the tests' folders, common to all ranks.
        strategy: Strategy by which the ranks wait for each other.
    """
    import keras
    import tensorflow as tf
    from keras.src.testing import test_case, test_utils

    counts: Counter[str] = Counter()

    def get_temp_dir(self: Any) -> str:
        counts[self.id()] += 1
        folder = directory / f"{zlib.crc32(self.id().encode())}_{counts[self.id()]}"
        folder.mkdir(exist_ok=True)
        return str(folder)

    test_case.TestCase.get_temp_dir = get_temp_dir
    # Without a seed it would draw a random one.
    test_utils.get_test_data.__defaults__ = (0,)
    fit = keras.Model.fit

    def fit_and_wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = fit(self, *args, **kwargs)
        strategy.extended.collective.all_gather(tf.zeros([1]), "after_fit")
        return result

    keras.Model.fit = fit_and_wait


def main() -> int:
    """Runs the tests; returns pytest's exit code."""
    run_file = Path(os.environ["KERAS_SUITE"])
    run = json.loads(run_file.read_text())
    rank = 0
    if run["strategy"] == "horovod":
        rank = int(os.environ["HOROVOD_RANK"])
    elif run["strategy"] == "multi_worker":
        rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    scope = Scope(run["strategy"], run["replicas"]) if run["strategy"] != "plain" else None
    ranks = 1 if run["strategy"] in ("plain", "mirrored") else run["replicas"]
    recorder = Recorder(run_file.parent, rank, ranks, scope, set(run["done"]))
    provide_conftest()
    if scope is not None and run["strategy"] != "mirrored":
        share_files(run_file.parent, scope.strategy)
    import keras

    # Resolved, as in pytest's names: a checkout may be reached by a link.
    root = Path(keras.__file__).resolve().parent / "src"
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(root), "-c", os.devnull]
    options += ["--continue-on-collection-errors", "--capture=no"]
    os.chdir(root)
    return int(pytest.main([*options, *run["tests"]], plugins=[recorder]))


if __name__ == "__main__":
    raise SystemExit(main())
