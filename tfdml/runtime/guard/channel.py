"""TCP channel between two processes of a job: JSON lines, authenticated by a shared secret."""

import contextlib
import hmac
import json
import os
import secrets
import select
import socket
import threading
import time
import weakref
from typing import Any

# A line is a heartbeat or a message for people: a longer one is not from tfdml.
_MAX_LINE = 1 << 20
_NONCE_BYTES = 32
_OPENING_SECONDS = 5.0

# A forked child (a data worker) would hold the connection open after this process dies.
_open: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


def _close_in_child() -> None:
    for open_socket in list(_open):
        with contextlib.suppress(OSError):
            open_socket.close()


os.register_at_fork(after_in_child=_close_in_child)


class Channel:
    """One end of an authenticated connection.

    Any thread may send; only one thread may receive.

    Args:
        connected: Connected socket; both ends have proved that they know the secret.
    """

    def __init__(self, connected: socket.socket):
        connected.settimeout(_OPENING_SECONDS)
        self._socket = connected
        self._readable = select.poll()
        self._readable.register(connected, select.POLLIN)
        self._buffer = b""
        self._sending = threading.Lock()
        _open.add(connected)

    def send(self, message: dict[str, Any]) -> bool:
        """Sends a message; returns False if the connection is broken."""
        try:
            with self._sending:
                self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self, seconds: float) -> dict[str, Any] | None:
        """Returns the next message, or None when `seconds` have passed without one.

        Raises:
            ConnectionError: If the other end has closed, or sent something that is not a message.
        """
        deadline = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            if not self._readable.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return None
            try:
                received = self._socket.recv(65536)
            except OSError as error:
                raise ConnectionError(str(error)) from error
            if not received or len(self._buffer) > _MAX_LINE:
                raise ConnectionError("The other end has closed.")
            self._buffer += received
        line, self._buffer = self._buffer.split(b"\n", 1)
        try:
            message = json.loads(line)
        except ValueError as error:
            raise ConnectionError(f"Not a message: {line[:80]!r}") from error
        if not isinstance(message, dict):
            raise ConnectionError(f"Not a message: {line[:80]!r}")
        return message

    def close(self) -> None:
        """Closes this end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def listen(host: str) -> socket.socket:
    """Returns a socket that listens on a free port of `host`, an address of this machine."""
    listener = socket.create_server((host, 0), backlog=128)
    _open.add(listener)
    return listener


def accept(listener: socket.socket, secret: bytes, seconds: float) -> Channel | None:
    """Accepts one connection.

    Returns:
        The channel; None after `seconds`, or if the other end does not know the secret.
    """
    listener.settimeout(seconds)
    try:
        connected, _ = listener.accept()
    except TimeoutError:
        return None
    return _opened(connected, secret, first=True)


def connect(host: str, port: int, secret: bytes, seconds: float) -> Channel | None:
    """Connects to a listener; returns None if none answers or it does not know the secret."""
    try:
        connected = socket.create_connection((host, port), timeout=seconds)
    except OSError:
        return None
    return _opened(connected, secret, first=False)


def _opened(connected: socket.socket, secret: bytes, first: bool) -> Channel | None:
    """Authenticates both ends by challenge and response; the secret itself is never sent."""
    try:
        connected.settimeout(_OPENING_SECONDS)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        own = secrets.token_bytes(_NONCE_BYTES)
        connected.sendall(own)
        other = _read(connected, _NONCE_BYTES)
        # The proofs of the two ends differ, so neither can replay the one that it received.
        connected.sendall(_proof(secret, b"first" if first else b"second", other))
        expected = _proof(secret, b"second" if first else b"first", own)
        if hmac.compare_digest(_read(connected, len(expected)), expected):
            return Channel(connected)
    except OSError:
        pass
    connected.close()
    return None


def _proof(secret: bytes, role: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, role + nonce, "sha256")


def _read(connected: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        received = connected.recv(count - len(data))
        if not received:
            raise ConnectionError("The other end has closed.")
        data += received
    return data
