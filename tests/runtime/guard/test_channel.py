"""Checks that the channel opens only for peers that know the secret."""

import json
import os
import socket
import threading
import time

import pytest

from tfdml.runtime.guard import channel

SECRET = b"s" * 32


@pytest.fixture
def listener():
    """Returns a socket that listens on the loopback."""
    with channel.listen("127.0.0.1") as listening:
        yield listening


def accepting(listener, secret=SECRET, seconds=5.0):
    """Accepts in the background; returns a function that waits for the result."""
    results = []
    thread = threading.Thread(
        target=lambda: results.append(channel.accept(listener, secret, seconds))
    )
    thread.start()

    def result():
        thread.join(10)
        return results[0]

    return result


def pair(listener):
    """Returns both ends of a channel."""
    accepted = accepting(listener)
    connected = channel.connect("127.0.0.1", listener.getsockname()[1], SECRET, 5.0)
    return accepted(), connected


def test_messages_arrive_in_order(listener):
    first, second = pair(listener)
    for number in range(100):
        assert first.send({"number": number, "text": "ü" * number})
    received = [second.receive(5.0) for _ in range(100)]
    assert [m["number"] for m in received] == list(range(100))
    assert received[99]["text"] == "ü" * 99
    assert second.receive(0.05) is None


@pytest.mark.parametrize(("theirs", "ours"), [(b"x" * 32, SECRET), (SECRET, b"x" * 32)])
def test_wrong_secret_is_rejected(listener, theirs, ours):
    accepted = accepting(listener, secret=ours)
    assert channel.connect("127.0.0.1", listener.getsockname()[1], theirs, 5.0) is None
    assert accepted() is None


def test_messages_cannot_be_reflected(listener):
    """A peer without the secret replies with the bytes it received."""
    accepted = accepting(listener)
    with socket.create_connection(listener.getsockname()) as mirror:
        mirror.settimeout(2)
        try:
            while data := mirror.recv(4096):
                mirror.sendall(data)
        except OSError:
            pass
    assert accepted() is None


def test_accept_times_out(listener):
    assert channel.accept(listener, SECRET, 0.05) is None


def test_closed_connection_is_an_error(listener):
    first, second = pair(listener)
    first.close()
    with pytest.raises(ConnectionError, match="closed"):
        second.receive(5.0)


@pytest.mark.parametrize("line", [b"no json\n", b"[1]\n", json.dumps("text").encode() + b"\n"])
def test_malformed_message_is_an_error(listener, line):
    first, second = pair(listener)
    first._socket.sendall(line)
    with pytest.raises(ConnectionError, match="Not a message"):
        second.receive(5.0)


def test_a_forked_child_does_not_keep_the_connection(listener):
    first, second = pair(listener)
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    try:
        first.close()
        with pytest.raises(ConnectionError):
            second.receive(5.0)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
