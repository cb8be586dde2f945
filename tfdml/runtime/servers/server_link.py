"""Link between the chief and its workers and servers: start, heartbeats and end of the job.

The chief listens on its address in `TF_CONFIG`; each `tfdml serve` connects to it and stays
connected. Both send heartbeats. The chief announces its end; if the link breaks before that, the
chief is lost. The chief's own TensorFlow server uses another port.
"""

import atexit
import contextlib
import hashlib
import json
import os
import socket
import sys
import threading
import time

from tfdml.runtime.descriptions import describe_error
from tfdml.runtime.guard import channel
from tfdml.runtime.immediate_exit import EXIT_SECONDS, end_after
from tfdml.runtime.servers.server_task import CHIEF, WORKER, ServerTask, name_of

_POLL_SECONDS = 0.1
_BEAT_SECONDS = 1.0
_CONNECT_SECONDS = 2.0
# TensorFlow's operations notice a lost connection slightly earlier than the link.
_LINK_SECONDS = 5.0
# Reason for a loss that is noticed only when the task is back.
_STARTED_AGAIN = "its process has been started again"


class ChiefLost(RuntimeError):
    """Raised when the chief did not start, failed, or ended without announcing it."""


class ServerLink:
    """The chief's side of the link.

    Args:
        task: Task of the chief.
        silence_limit: Seconds without a message after which a task counts as lost.

    Attributes:
        lost: Reason for each loss, by role and index. A worker that reconnects is no longer lost;
            a server stays lost, because its variables are, until `wait_for_return`.
        returned: Number of times that a lost worker has reconnected.

    Raises:
        OSError: If the chief's port is taken.
    """

    def __init__(self, task: ServerTask, silence_limit: float):
        self._task = task
        self._limit = silence_limit
        self._secret = _secret(task)
        port = int(task.address.rpartition(":")[2])
        try:
            self._listener = socket.create_server(("", port), backlog=1024)
        except OSError as error:
            raise OSError(
                f"The chief's port must be free. Received: {task.address}, {error.strerror}. Stop "
                f"the program that listens there, or choose another port in TF_CONFIG."
            ) from error
        self._channels: dict[tuple[str, int], channel.Channel] = {}
        self._heard: dict[tuple[str, int], float] = {}
        self._changed = threading.Condition()
        self.lost: dict[tuple[str, int], str] = {}
        self.returned = 0
        self._failure: str | None = None
        self._done = False
        for run in (self._accept, self._watch):
            threading.Thread(target=run, name="tfdml-server-link", daemon=True).start()
        previous = sys.excepthook
        sys.excepthook = lambda *error: self._on_uncaught(previous, *error)
        atexit.register(self._say_bye)

    def wait_for_peers(self, seconds: float) -> None:
        """Waits until all workers and servers have connected.

        Raises:
            TimeoutError: If some have not connected after `seconds`; it names them.
        """
        deadline = time.monotonic() + seconds
        with self._changed:
            while missing := [t for t in self._task.others if t not in self._channels]:
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    names = ", ".join(
                        f"{name_of(*t)} ({self._task.cluster[t[0]][t[1]]})" for t in missing
                    )
                    raise TimeoutError(
                        f"All workers and servers must connect within `start_limit`, {seconds:.0f} "
                        f"s. Received: nothing from {names}. Run `tfdml serve` there with the same "
                        f"cluster in TF_CONFIG, and check that it reaches the chief at "
                        f"{self._task.address}."
                    )

    def lost_indices(self, role: str) -> list[int]:
        """Returns the indices of the lost tasks of a role."""
        with self._changed:
            return sorted(index for r, index in self.lost if r == role)

    def wait_for_loss(self, role: str) -> list[int]:
        """Returns the indices of the lost tasks of a role, after an operation on one has failed."""
        with self._changed:
            self._changed.wait_for(lambda: any(r == role for r, _ in self.lost), _LINK_SECONDS)
        return self.lost_indices(role)

    def missing_indices(self, role: str) -> list[int]:
        """Returns the indices of the lost tasks of a role that have not reconnected."""
        with self._changed:
            return sorted(i for r, i in self.lost.keys() - self._channels.keys() if r == role)

    def wait_for_return(self, role: str, seconds: float) -> list[int]:
        """Waits until all lost tasks of a role have reconnected; then they are no longer lost.

        Returns:
            Their indices; none if some have not reconnected after `seconds`.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self.missing_indices(role), seconds):
                return []
            returned = self.lost_indices(role)
            for index in returned:
                del self.lost[role, index]
        for index in returned:
            _say(f"{name_of(role, index)} is back.")
        return returned

    def wait_for_workers(self) -> None:
        """Waits until no worker is lost, after an operation on one has failed."""
        self.wait_for_loss(WORKER)
        with self._changed:
            self._changed.wait_for(lambda: not self.lost_indices(WORKER))

    def _accept(self) -> None:
        while True:
            other = channel.accept(self._listener, self._secret, 3600.0)
            if other is None:
                continue
            with contextlib.suppress(ConnectionError):
                hello = other.receive(_CONNECT_SECONDS) or {}
                task = (hello.get("role"), hello.get("index"))
                if task in self._task.others:
                    self._welcome(task, other)

    def _welcome(self, task: tuple[str, int], other: channel.Channel) -> None:
        with self._changed:
            was_lost = self.lost.pop(task, None) if task[0] == WORKER else None
            unnoticed = task[0] != WORKER and task in self._channels
            if unnoticed:
                self.lost[task] = _STARTED_AGAIN
            self._channels[task] = other
            self._heard[task] = time.monotonic()
            self.returned += was_lost is not None
            self._changed.notify_all()
        if unnoticed:
            _say(f"{name_of(*task)} is lost: {_STARTED_AGAIN}.")
        if was_lost is not None:
            _say(f"{name_of(*task)} is back.")

    def _watch(self) -> None:
        last_beat = 0.0
        while True:
            time.sleep(_POLL_SECONDS)
            now = time.monotonic()
            beat = now - last_beat >= _BEAT_SECONDS
            last_beat = now if beat else last_beat
            with self._changed:
                linked = list(self._channels.items())
            for task, other in linked:
                why = self._look_at(task, other, beat)
                if why is not None:
                    self._lose(task, other, why)

    def _look_at(self, task: tuple[str, int], other: channel.Channel, beat: bool) -> str | None:
        """Reads a task's messages; returns the reason if the task is lost, otherwise None."""
        try:
            while other.receive(0.0) is not None:
                self._heard[task] = time.monotonic()
        except ConnectionError:
            return "its process has ended"
        if beat and not other.send({"kind": "beat"}):
            return "its process has ended"
        if time.monotonic() - self._heard[task] > self._limit:
            return f"nothing was heard from it for {self._limit:.0f} s"
        return None

    def _lose(self, task: tuple[str, int], other: channel.Channel, why: str) -> None:
        with self._changed:
            # The task has reconnected in the meantime, or ends because the chief has.
            if self._channels.get(task) is not other or self._done:
                return
            del self._channels[task]
            self.lost[task] = why
            self._changed.notify_all()
        other.close()
        after = "its steps go to other workers until it is back" if task[0] == WORKER else ""
        _say(f"{name_of(*task)} is lost: {why}{'; ' if after else ''}{after}.")

    def _on_uncaught(self, previous, kind, error, trace) -> None:
        self._failure = describe_error(error)
        previous(kind, error, trace)

    def _say_bye(self) -> None:
        message = {"kind": "done"} if self._failure is None else {"kind": "failed"}
        with self._changed:
            self._done = True
            linked = list(self._channels.values())
        for other in linked:
            other.send({**message, "error": self._failure})
        if self._failure is not None:
            end_after(EXIT_SECONDS, code=1)


def follow_chief(task: ServerTask, start_limit: float, silence_limit: float) -> None:
    """Connects a worker or server to the chief; returns when the chief is done.

    Args:
        task: Task of this process.
        start_limit: Seconds to wait for the chief to start.
        silence_limit: Seconds without a message after which the chief counts as lost.

    Raises:
        ChiefLost: If the chief did not start, was lost, or failed.
    """
    address = task.cluster[CHIEF][0]
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + start_limit
    secret = _secret(task)
    while not (link := channel.connect(host.strip("[]"), int(port), secret, _CONNECT_SECONDS)):
        if time.monotonic() > deadline:
            raise ChiefLost(
                f"the chief at {address} did not answer within {start_limit:.0f} s, or its "
                f"TF_CONFIG has another cluster"
            )
        time.sleep(_POLL_SECONDS)
    link.send({"kind": "hello", "role": task.role, "index": task.index, "pid": os.getpid()})
    heard = time.monotonic()
    while True:
        try:
            message = link.receive(_BEAT_SECONDS)
        except ConnectionError as error:
            raise ChiefLost(f"the chief at {address} is lost: its process has ended") from error
        link.send({"kind": "beat"})
        if message is not None:
            heard = time.monotonic()
            if message.get("kind") == "done":
                return
            if message.get("kind") == "failed":
                raise ChiefLost(f"the chief at {address} has failed: {message.get('error')}")
        if time.monotonic() - heard > silence_limit:
            raise ChiefLost(
                f"the chief at {address} is lost: nothing was heard from it for "
                f"{silence_limit:.0f} s"
            )


def _secret(task: ServerTask) -> bytes:
    """Returns a key that distinguishes clusters. It is not secret: the addresses determine it."""
    return hashlib.sha256(json.dumps(task.cluster, sort_keys=True).encode()).digest()


def _say(text: str) -> None:
    print(f"tfdml: {text}", file=sys.stderr, flush=True)
