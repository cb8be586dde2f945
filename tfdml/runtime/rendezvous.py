"""Bounded wait for the other workers that names the missing ones, before TensorFlow starts.

TensorFlow's server waits an hour for the others, ignores signals, blocks other threads, and does
not say which worker is missing. So each process first listens on its own port and probes the
others' ports.
"""

import contextlib
import faulthandler
import socket
import time
from collections.abc import Iterator, Sequence

_PROBE_SECONDS = 1.0
_PAUSE_SECONDS = 0.2
_STDERR = 2


def wait_for_peers(addresses: Sequence[str], rank: int, limit: float) -> None:
    """Waits until every rank listens on its port.

    Args:
        addresses: Addresses of all ranks, as "host:port", in rank order.
        rank: Rank of this process.
        limit: Seconds to wait.

    Raises:
        OSError: If this rank's port is taken.
        TimeoutError: If a rank does not listen in time.
    """
    own = _parse(addresses[rank])[1]
    try:
        # The operating system answers the probes; no connection needs to be accepted.
        listener = socket.create_server(("", own), backlog=4096)
    except OSError as error:
        raise OSError(
            f"The port of every rank must be free on its machine. Received on rank {rank}: "
            f"{addresses[rank]}, {error.strerror}. Stop the program that listens there, or choose "
            f"another port."
        ) from error
    deadline = time.monotonic() + limit
    missing = {r: "" for r in range(len(addresses)) if r != rank}
    with listener:
        while missing:
            for other in list(missing):
                problem = _problem_of(addresses[other])
                if problem is None:
                    del missing[other]
                else:
                    missing[other] = problem
            if missing and time.monotonic() > deadline:
                raise TimeoutError(_explain(addresses, rank, limit, missing))
            if missing:
                time.sleep(_PAUSE_SECONDS)


@contextlib.contextmanager
def exit_after(seconds: float) -> Iterator[None]:
    """Context manager: ends this process, with a traceback, if the block takes longer.

    Python's other timers need the GIL, which TensorFlow holds while it starts.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=_STDERR)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _explain(addresses: Sequence[str], rank: int, limit: float, missing: dict[int, str]) -> str:
    ranks = ", ".join(map(str, missing))
    problems = "; ".join(f"rank {r} at {addresses[r]}: {p}" for r, p in missing.items())
    return (
        f"All {len(addresses)} ranks must connect within `start_limit`, {limit:.0f} s. Received on "
        f"rank {rank}: no answer from rank {ranks} ({problems}). Start the script on every machine "
        f"of the cluster, and check addresses and firewalls."
    )


def _parse(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _problem_of(address: str) -> str | None:
    """Returns the error of connecting to an address, None if a process listens there."""
    try:
        socket.create_connection(_parse(address), timeout=_PROBE_SECONDS).close()
    except OSError as error:
        return str(error)
    return None
