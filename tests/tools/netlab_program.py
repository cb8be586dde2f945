"""Programs of hosts 0 and 1 of a network lab: `netlab_program.py NAME ARGUMENTS` runs a function.

Host 1 sends, host 0 receives and prints what it has seen as JSON. `round_trips` needs host 1 only.
"""

import json
import os
import random
import select
import socket
import struct
import sys
import time
from pathlib import Path

HOST = int(os.environ["NETLAB_HOST"])
# From <asm-generic/socket.h>: root may exceed the system's limits.
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
BLOCK = 1 << 20


def connection(port: int = 5000) -> socket.socket:
    """Returns a TCP connection between the two hosts."""
    if HOST == 0:
        return socket.create_server(("host0", port)).accept()[0]
    while True:
        try:
            return socket.create_connection(("host0", port))
        except ConnectionRefusedError:
            time.sleep(0.02)


def datagrams() -> socket.socket:
    """Returns a UDP socket, which receives on host 0; its buffers never limit it."""
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for option in (SO_SNDBUFFORCE, SO_RCVBUFFORCE):
        made.setsockopt(socket.SOL_SOCKET, option, 64 << 20)
    if HOST == 0:
        made.bind(("host0", 5000))
    return made


def receive(from_: socket.socket, size: int) -> bytes:
    """Returns exactly that many bytes."""
    parts = []
    while size:
        parts.append(from_.recv(min(size, BLOCK)))
        if not parts[-1]:
            raise EOFError(f"The connection must bring {size} bytes more.")
        size -= len(parts[-1])
    return b"".join(parts)


def show(seen) -> None:
    """Prints a result as JSON."""
    print(json.dumps(seen), flush=True)


def round_trips(address: str, times: int) -> None:
    """Prints the seconds that a closed port takes to refuse a connection: kernels answer.

    None for no answer within a second.
    """
    if HOST != 1:
        return
    seen = []
    for _ in range(times):
        begin = time.perf_counter()
        try:
            socket.create_connection((address, 9), timeout=1)
        except ConnectionRefusedError:
            seen.append(time.perf_counter() - begin)
        except TimeoutError:
            seen.append(None)
    show(seen)


def message(size: int) -> None:
    """Prints the seconds from a message to its short answer, on a link that was idle."""
    both = connection()
    if HOST == 0:
        receive(both, size)
        both.sendall(b"!")
    else:
        begin = time.perf_counter()
        both.sendall(bytes(size))
        receive(both, 1)
        show(time.perf_counter() - begin)


def copy(times: int, size: int) -> None:
    """Sends random bytes; prints if all arrive unchanged, and the number of packets sent again.

    Each time has a connection, which ends with the last packet of the bytes.
    """
    data = random.Random(0).randbytes(size)
    again = 0
    for i in range(times):
        both = connection(5000 + i)
        if HOST == 0:
            if receive(both, size) != data or both.recv(1):
                raise ValueError("Bytes must arrive as they were sent, and nothing else.")
            both.sendall(b"!")
        else:
            both.sendall(data)
            both.shutdown(socket.SHUT_WR)
            receive(both, 1)
            # tcpi_total_retrans of <linux/tcp.h>.
            state = both.getsockopt(socket.SOL_TCP, socket.TCP_INFO, 104)
            again += struct.unpack_from("I", state, 100)[0]
    if HOST == 1:
        show(again)


def congestion_control() -> None:
    """Prints TCP's congestion control of a connection."""
    both = connection()
    if HOST == 1:
        show(both.getsockopt(socket.SOL_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode())


def flood(count: int, size: int, ready: str) -> None:
    """Prints the numbers of the datagrams that arrive, in the order of their arrival.

    They are the first packets that leave host 1: a file says that host 0 is ready.
    """
    loose = datagrams()
    if HOST == 0:
        server = socket.create_server(("host0", 5000))
        Path(ready).touch()
        seen, end = [], False
        while not end:
            # Behind all datagrams: links keep the order.
            end = server in select.select([loose, server], [], [])[0]
            while select.select([loose], [], [], 0)[0]:
                seen.append(int.from_bytes(loose.recv(2048)[:4], "big"))
        # Until host 1 closes it: the connection would be reset if this host ended earlier.
        server.accept()[0].recv(1)
        show(seen)
    else:
        while not Path(ready).exists():
            time.sleep(0.02)
        for i in range(count):
            loose.sendto(i.to_bytes(4, "big") + bytes(size - 4), ("host0", 5000))
            if i % 200 == 0:
                # The relay's queue is not what is tested.
                time.sleep(0.002)
        connection().close()


def ticks() -> None:
    """Prints the numbers of ticks that arrive, until some are missing and others have come."""
    loose = datagrams()
    both = connection()
    if HOST == 0:
        seen, missing, further = [0], False, 0
        while further < 10:
            seen.append(int(loose.recv(16)))
            missing = missing or seen[-1] - seen[-2] > 10
            further += missing
        both.sendall(b"!")
        show(seen)
    else:
        number = 0
        while not select.select([both], [], [], 0.01)[0]:
            number += 1
            loose.sendto(str(number).encode(), ("host0", 5000))


def stream(skipped: float, seconds: float) -> None:
    """Prints the bits per second of a TCP connection, measured some seconds after its start."""
    both = connection()
    if HOST == 1:
        try:
            while True:
                both.sendall(bytes(BLOCK))
        except OSError:
            return
    buffer = bytearray(BLOCK)
    begin = time.perf_counter()
    while time.perf_counter() < begin + skipped:
        both.recv_into(buffer)
    begin, received = time.perf_counter(), 0
    while (now := time.perf_counter()) < begin + seconds:
        received += both.recv_into(buffer)
    show(8 * received / (now - begin))


if __name__ == "__main__":
    globals()[sys.argv[1]](*(json.loads(argument) for argument in sys.argv[2:]))
