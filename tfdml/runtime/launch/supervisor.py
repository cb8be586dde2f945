"""Runs one command and leaves no process behind.

Usage: `python -m tfdml.runtime.launch.supervisor COMMAND`.

It runs between the launcher and a rank, on the rank's machine. The launcher holds the other end of
its standard input: when that closes, for whatever reason, the supervisor ends the command and all
its descendants. With `--watch-output` it watches for the reader of its standard output instead:
`horovodrun` gives its ranks no input, but reads what they print, also by ssh. Orphaned descendants
become children of the supervisor, so it finds them all. `--free-ports N` prints N ports of this
machine on which nothing listens.
"""

import contextlib
import ctypes
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

from tfdml.runtime.launch.processes import end_processes, exit_code, process_tree

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
# Seconds between SIGTERM and SIGKILL.
TERM_SECONDS = 5.0
# Lower ports may belong to well-known services.
_FIRST_PORT = 10_000
_GIVEN_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def supervise(command: list[str], watch_output: bool = False) -> int:
    """Runs a command to its end, or until the launcher is gone.

    Args:
        command: Program and its arguments.
        watch_output: Whether to detect the launcher's end by the reader of standard output, not by
            the other end of standard input.

    Returns:
        Exit code, or 128 plus the signal number if a signal ended the command.
    """
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    own = os.getpid()

    def in_child() -> None:
        # If the supervisor itself is killed, so is the command.
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != own:
            os._exit(1)

    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=in_child
    )
    gone = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: gone.set())
    watch = _watch_output if watch_output else _watch_input
    threading.Thread(target=watch, args=(gone,), daemon=True).start()
    while child.poll() is None and not gone.is_set():
        gone.wait(0.05)
    # Read before waiting for the others, because a process can be waited for only once.
    code = -signal.SIGTERM if child.poll() is None else child.returncode
    end_processes(process_tree(own)[1:], TERM_SECONDS)
    return exit_code(code)


def free_ports(count: int) -> list[int]:
    """Returns ports of this machine on which nothing listens now.

    They are outside the system's ephemeral range: an outgoing connection could take one of those
    before a rank listens on it.
    """
    first_given = int(_GIVEN_PORTS.read_text(encoding="ascii").split()[0])
    candidates = list(range(_FIRST_PORT, first_given))
    random.shuffle(candidates)
    ports = []
    for port in candidates:
        if len(ports) == count:
            return ports
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            ports.append(port)
    # The ephemeral range covers too many ports: take the rest from it.
    with contextlib.ExitStack() as stack:
        found = [
            stack.enter_context(socket.create_server(("", 0))) for _ in range(count - len(ports))
        ]
        return ports + [s.getsockname()[1] for s in found]


def _watch_input(gone: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    gone.set()


def _watch_output(gone: threading.Event) -> None:
    # No events are requested: `poll` reports the loss of the reader in any case.
    output = select.poll()
    output.register(1, 0)
    output.poll()
    gone.set()


def main(arguments: list[str]) -> int:
    """Runs this module's command line."""
    if arguments[:1] == ["--free-ports"]:
        print(*free_ports(int(arguments[1])))
        return 0
    if arguments[:1] == ["--watch-output"]:
        return supervise(arguments[1:], watch_output=True)
    return supervise(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
