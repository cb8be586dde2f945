"""An elastic training: `program.py OUT HOSTS RANK:STEP:ACTION...`.

It records in OUT what each rank has trained. HOSTS is the file that the host discovery prints. At
STEP (counted over the whole training; `before9` is its begin, `begin2` that of epoch 2, `commit3`
the exchange of the third commit's parts, `end` the training's end, while the last checkpoint is
written) RANK does ACTION: it kills itself (`kill`),
writes HOSTS (`hosts=a:1+@:1`, where `@` is its own host), or waits until it is notified of other
hosts (`notified`).
Plans without a rank: `scale` makes the global batch and the learning rate follow the number of
ranks, and keeps the order of the samples; `disk` also saves checkpoints in OUT, every third step;
commits each fifth step of an epoch instead of each second; `records=DIRECTORY` reads the data there
instead of arrays, and keeps a ledger in OUT; `sharded` divides the optimizer's state, and
`replicated` keeps each part twice; `local` synchronizes after each third step of an epoch alone;
`watched` adds `PerformanceMetrics`, and tries to record a timeline at the end.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import keras
import numpy as np

import tfdml
from tfdml.callbacks import FaultTolerantCheckpoint
from tfdml.checkpointing.files import Files
from tfdml.elastic import commit_store

out, hosts, *plans = sys.argv[1:]
SAMPLES, BATCH, RATE, EPOCHS = 48, 8, 0.01, 4
scale, slow, disk = ("scale" in plans, "slow disk" in plans, "disk" in " ".join(plans))
often = "disk often" in plans
records = next((p.partition("=")[2] for p in plans if p.startswith("records=")), None)
plans = [plan for plan in plans if ":" in plan and not plan.startswith("records=")]
if slow:
    sync = Files.sync

    def sync_slowly(self, file: int) -> None:
        Path(out, f"saving{os.getpid()}").touch()
        time.sleep(0.5)
        sync(self, file)
        Path(out, f"saving{os.getpid()}").unlink()

    Files.sync = sync_slowly


class MembershipPlan(keras.callbacks.Callback):
    """Executes the plan, each action once; records losses."""

    def __init__(self):
        super().__init__()
        self.losses = []
        self.sizes = []

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(logs["loss"])
        self.sizes.append(strategy.size)
        self.come_to(str(len(self.losses)))

    def on_train_batch_begin(self, batch, logs=None):
        self.come_to(f"before{len(self.losses) + 1}")

    def on_epoch_begin(self, epoch, logs=None):
        self.come_to(f"begin{epoch}")

    def on_train_end(self, logs=None):
        self.come_to("end")

    def come_to(self, now: str) -> None:
        for number, plan in enumerate(plans):
            rank, when, action = plan.split(":", 2)
            done = Path(out, f"done{number}")
            if (str(strategy.rank), now) == (rank, when) and not done.exists():
                done.write_text(str(time.time()))
                do(action)


def do(action: str) -> None:
    """Executes one action of the plan."""
    if action == "kill":
        # If there are several actions, wait until the slowest rank reaches them too.
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "notified":
        deadline = time.monotonic() + 60
        while not state._commits.hosts_pending and time.monotonic() < deadline:
            time.sleep(0.1)
    else:
        # Atomically: a discovery that finds an empty list considers all hosts lost.
        lines = action.partition("=")[2].replace("@", os.environ.get("HOROVOD_HOSTNAME", ""))
        Path(f"{hosts}.new").write_text(lines.replace("+", "\n") + "\n")
        os.replace(f"{hosts}.new", hosts)


def parts_of_previous(*arguments):
    """Executes the plan in the exchange of a commit's parts, before this rank has sent its own."""
    global commits
    commits += 1
    plan.come_to(f"commit{commits}")
    return exchange_parts(*arguments)


commits, exchange_parts = 0, commit_store.parts_of_previous
commit_store.parts_of_previous = parts_of_previous

keras.utils.set_random_seed(5)
sharding = None
if {"sharded", "replicated"} & set(sys.argv):
    sharding = tfdml.Sharding(replicated="replicated" in sys.argv)
local_updates = tfdml.local_updates.LocalSGD(3) if "local" in sys.argv else None
strategy = tfdml.HorovodStrategy(sharding=sharding, local_updates=local_updates)
with strategy.scope():
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(3)]
    )
    model.compile(keras.optimizers.Adam(RATE), "mse", metrics=["mae"])
numbers = np.random.default_rng(0)
x = numbers.normal(size=(SAMPLES, 6)).astype("float32")
y = numbers.normal(size=(SAMPLES, 3)).astype("float32")
plan = MembershipPlan()
refusals: list[str] = []


@tfdml.elastic.run
def train(state):
    checkpoint = (
        FaultTolerantCheckpoint(Path(out, "run"), save_freq=1 if often else 3) if disk else None
    )
    committer = state.committer(steps=5 if often else 2, checkpoint=checkpoint)
    batch = BATCH
    if scale:
        committer, batch = state.committer(rule="linear"), BATCH * strategy.size
        model.optimizer.learning_rate = RATE * strategy.size
    data = {"x": x, "y": y, "batch_size": batch, "shuffle": not scale}
    if records:
        data = {"x": tfdml.data.read_tfrecords(
            records, BATCH, features=["x"], label="y", seed=5, ledger=Path(out, "ledger")
        )}  # fmt: skip
    callbacks = [plan, committer]
    if "watched" in sys.argv:
        callbacks.append(tfdml.callbacks.PerformanceMetrics(directory=Path(out, "ranks")))
    history = model.fit(**data, epochs=EPOCHS, verbose=0, callbacks=callbacks)
    if "watched" in sys.argv:
        try:
            model.fit(**data, callbacks=[tfdml.callbacks.Timeline(Path(out, "timeline"))])
        except ValueError as error:
            refusals.append(str(error))
    return history


state = tfdml.elastic.KerasState(model)
history = train(state)
result = {
    "rank": strategy.rank,
    "size": strategy.size,
    "losses": plan.losses,
    "sizes": plan.sizes,
    "rate": float(keras.ops.convert_to_numpy(model.optimizer.learning_rate)),
    "iterations": int(model.optimizer.iterations.numpy()),
    "history": history.history,
    "weights": [np.asarray(w).tolist() for w in model.get_weights()],
    "refusals": refusals,
    "slots": [int(np.prod(v.shape)) for v in model.optimizer.variables],
}
Path(out, f"result{strategy.rank}.json").write_text(json.dumps(result))
