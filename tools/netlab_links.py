"""Links between the hosts of `tools/netlab`: addresses, rate, latency, losses and outages.

By default a bridge is between the hosts, and `tc` shapes what leaves each of them. With a latency
or losses, netem is added where the kernel has it; elsewhere the relay of `netlab_relay.cc` takes
the place of the bridge. Both are used within the lab's own namespaces.
"""

import dataclasses
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

import platformdirs

_NETWORK = "10.77.0"
# Address of the lab itself.
SWITCH = f"{_NETWORK}.254"
_RELAY = Path(__file__).with_name("netlab_relay.cc")
_BITS = {"bit": 1, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
# Maximum of TCP's buffers with a latency: they never limit a stream of 5 Gbit/s at 100 ms.
_TCP_BUFFER = 64 << 20
# States of a bridge's port, from <linux/if_bridge.h>.
_DISABLED, _FORWARDING = "0", "3"


def refuse(message: str) -> NoReturn:
    """Ends the tool, whatever else runs in its process, with an error message."""
    print(f"netlab: {message}", file=sys.stderr, flush=True)
    os._exit(2)


def run(*command: str) -> str:
    """Runs a system command that must succeed; returns its output."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        output = done.stderr.strip() or done.stdout.strip()
        refuse(f"`{' '.join(command)}` failed: {output}")
    return done.stdout


def address(host: int) -> str:
    """Returns a host's address."""
    return f"{_NETWORK}.{host + 1}"


def _seconds(text: str) -> float | None:
    """Returns a time such as 5ms in seconds; None if it is none."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", text)
    return float(found[1]) * _SECONDS[found[2]] if found else None


@dataclasses.dataclass(frozen=True)
class Outage:
    """Time in which a host is cut off.

    Attributes:
        host: The host's number.
        begin: Seconds after the start of the command.
        end: Seconds after the start; None if it lasts to the end.
    """

    host: int
    begin: float
    end: float | None


def outage_of(text: str, hosts: int) -> Outage:
    """Returns an outage from text such as host1:20s:10s, or host1:20s for good."""
    name, *times = text.split(":")
    seconds = [_seconds(time) for time in times]
    names = [f"host{i}" for i in range(hosts)]
    if name not in names or len(times) not in (1, 2) or None in seconds:
        refuse(
            f"`--outage` must be one of the {hosts} hosts, the time of its outage and, unless it "
            f"is for good, how long it lasts, such as host1:20s:10s. Received: {text!r}."
        )
    begin, end = seconds[0], sum(seconds) if len(seconds) == 2 else None
    return Outage(names.index(name), begin, end)


@dataclasses.dataclass(frozen=True)
class Quality:
    """Properties of each host's link; all but the buffers are of what leaves it.

    Attributes:
        rate: Bits per second as `tc` understands them, such as 100mbit; unlimited if empty.
        latency: Time on the way such as 5ms; none if empty.
        loss: Share of lost packets such as 0.1%; none if empty.
        by_relay: Whether the relay is used even if the kernel has netem.
        seed: Seed of the relay's losses.
        congestion: TCP's congestion control; the machine's if empty.
    """

    rate: str
    latency: str
    loss: str
    by_relay: bool
    seed: int
    congestion: str

    def __post_init__(self):
        """Refuses wrong values, before anything is made."""
        _ = self.nanoseconds, self.probability, self.is_far and self.bits

    @property
    def is_far(self) -> bool:
        """Whether more than the rate is to be simulated."""
        return bool(self.latency or self.loss or self.by_relay)

    @property
    def nanoseconds(self) -> int:
        """The latency."""
        seconds = _seconds(self.latency or "0s")
        if seconds is None:
            refuse(f"`--latency` must be a time such as 5ms. Received: {self.latency!r}.")
        return round(seconds * 1e9)

    @property
    def probability(self) -> float:
        """The probability of a loss."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?)%", self.loss or "0%")
        if found is None or float(found[1]) > 100:
            refuse(f"`--loss` must be a percentage such as 0.1%. Received: {self.loss!r}.")
        return float(found[1]) / 100

    @property
    def bits(self) -> float:
        """Bits per second, for the relay; 0 if unlimited."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?)(bit|kbit|mbit|gbit)", self.rate or "0bit")
        if found is None:
            refuse(f"`--rate` must be bits per second such as 100mbit. Received: {self.rate!r}.")
        return float(found[1]) * _BITS[found[2]]


class Links:
    """The links of all hosts, while the lab runs."""

    def __init__(self, hosts: int, quality: Quality):
        """Creates the hosts, their names, and the links between them.

        Args:
            hosts: The number of hosts; their namespaces are named host0, host1, ...
            quality: Properties of the links.
        """
        self._hosts = [f"host{i}" for i in range(hosts)]
        self._quality = quality
        self._relay: subprocess.Popen | None = None
        self._name_hosts()
        run("ip", "link", "set", "lo", "up")
        for host in self._hosts:
            run("ip", "netns", "add", host)
            run("ip", "-n", host, "link", "set", "lo", "up")
        if quality.by_relay or (quality.is_far and not _kernel_has_netem()):
            self._relay = self._start_relay()
        else:
            self._connect_by_bridge()
        run("ip", "address", "add", f"{SWITCH}/24", "dev", "switch")
        run("ip", "link", "set", "switch", "up")
        for i, host in enumerate(self._hosts):
            run("ip", "-n", host, "address", "add", f"{address(i)}/24", "dev", "eth0")
            run("ip", "-n", host, "link", "set", "eth0", "up")
            self._tune(i)
            self._shape(host)

    def _name_hosts(self) -> None:
        # Files name the namespaces: they are in memory, and visible only to this lab.
        Path("/run/netns").mkdir(exist_ok=True)
        run("mount", "-t", "tmpfs", "tmpfs", "/run/netns")
        with tempfile.NamedTemporaryFile("w", dir="/run/netns", delete=False) as names:
            own = [f"{address(i)} {host}" for i, host in enumerate(self._hosts)]
            names.write("\n".join(["127.0.0.1 localhost", *own]) + "\n")
        Path(names.name).chmod(0o644)
        run("mount", "--bind", names.name, "/etc/hosts")

    def _connect_by_bridge(self) -> None:
        run("ip", "link", "add", "switch", "type", "bridge")
        for i, host in enumerate(self._hosts):
            pair = ["type", "veth", "peer", "name", "eth0", "netns", host]
            run("ip", "link", "add", f"port{i}", *pair)
            run("ip", "link", "set", f"port{i}", "master", "switch", "up")

    def _start_relay(self) -> subprocess.Popen:
        """Starts the relay, which makes the interfaces of the hosts and of the lab."""
        quality = self._quality
        # The bytes of a burst follow at little more than the rate, to never pile up behind it.
        far = [1.001 * quality.bits, quality.nanoseconds, quality.probability, quality.seed]
        ports = ["switch", SWITCH, ""]
        for i, host in enumerate(self._hosts):
            ports += ["eth0", address(i), f"/run/netns/{host}"]
        relay = subprocess.Popen(
            [_compiled_relay(), *map(str, far), *ports],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if relay.stdout.readline() != "ready\n":
            refuse("The relay must start: see its error above. It needs /dev/net/tun.")
        # The relay may be late by some milliseconds; until then packets must find room.
        longer = ["txqueuelen", "10000"]
        run("ip", "link", "set", "switch", *longer)
        for host in self._hosts:
            run("ip", "-n", host, "link", "set", "eth0", *longer)
        return relay

    def _tune(self, host: int) -> None:
        """Sets a host's TCP: its congestion control, and buffers that never limit it."""
        name = self._hosts[host]
        if self._quality.congestion:
            # By the route: in a namespace, the system's setting knows only those allowed to users.
            route = [f"{_NETWORK}.0/24", "dev", "eth0", "proto", "kernel", "scope", "link"]
            route += ["src", address(host), "congctl", self._quality.congestion]
            run("ip", "-n", name, "route", "change", *route)
        if self._quality.latency:
            script = f"""
                echo "4096 16384 {_TCP_BUFFER}" > /proc/sys/net/ipv4/tcp_wmem
                echo "4096 131072 {_TCP_BUFFER}" > /proc/sys/net/ipv4/tcp_rmem
            """
            run("ip", "netns", "exec", name, "sh", "-e", "-c", script)

    def _shape(self, host: str) -> None:
        """Shapes what leaves a host."""
        quality = self._quality
        add = ["tc", "-n", host, "qdisc", "add", "dev", "eth0"]
        attach = ["root", "handle", "1:"]
        if quality.rate:
            run(*add, *attach, "tbf", "rate", quality.rate, "burst", "128kb", "latency", "50ms")
            attach = ["parent", "1:1", "handle", "10:"]
        if quality.rate and self._relay is not None:
            # A super-packet arrives at once, so it has at most what is sent in half a millisecond.
            largest = min(65536, max(4096, round(quality.bits / 8 * 0.5e-3)))
            run("ip", "-n", host, "link", "set", "eth0", "gso_max_size", str(largest))
        if quality.is_far and self._relay is None:
            # A queue for the packets in flight at 10 Gbit/s and 100 ms.
            options = ["limit", "100000"]
            options += ["delay", quality.latency] if quality.latency else []
            options += ["loss", quality.loss] if quality.loss else []
            run(*add, *attach, "netem", *options)
            if quality.loss:
                # It would lose super-packets as a whole.
                run("ip", "-n", host, "link", "set", "eth0", "gso_max_segs", "1")

    def connect(self, host: int, connected: bool) -> None:
        """Ends or begins an outage of a host: nothing leaves or reaches it."""
        if self._relay is None:
            state = _FORWARDING if connected else _DISABLED
            run("bridge", "link", "set", "dev", f"port{host}", "state", state)
        elif self._relay.poll() is None:
            # Port 0 is the lab's own.
            self._relay.stdin.write(f"{'up' if connected else 'down'} {host + 1}\n")
            self._relay.stdin.flush()

    def check(self) -> None:
        """Ends the tool if packets are no longer carried."""
        if self._relay is not None and self._relay.poll() is not None:
            refuse(f"The relay must not end. Received: exit code {self._relay.returncode}.")

    def summary(self) -> str:
        """Ends the relay; returns what figures should tell of simulated links, or ""."""
        if not self._quality.is_far:
            return ""
        inside = ["ip", "netns", "exec", self._hosts[0]]
        by_default = ["cat", "/proc/sys/net/ipv4/tcp_congestion_control"]
        control = self._quality.congestion or run(*inside, *by_default).strip()
        full = sum(self._dropped(host) for host in self._hosts)
        if self._relay is None:
            return f"netem, congestion control {control}, {full} packets dropped by full queues"
        output, _ = self._relay.communicate()
        counts = json.loads(output)
        return (
            f"relay {counts['cpu']:.2f} s of CPU for {counts['bytes'] / 1e6:.1f} MB, congestion "
            f"control {control}, {full + counts['full']} packets dropped by full queues, "
            f"{counts['lost']} lost, {counts['unplugged']} in outages"
        )

    def _dropped(self, host: str) -> int:
        """Returns the number of packets that found a host's queues full."""
        queues = json.loads(run("tc", "-n", host, "-s", "-j", "qdisc", "show", "dev", "eth0"))
        link = json.loads(run("ip", "-n", host, "-s", "-j", "link", "show", "dev", "eth0"))
        tbf = sum(queue["drops"] for queue in queues if queue["kind"] == "tbf")
        return tbf + link[0]["stats64"]["tx"]["dropped"]


def _kernel_has_netem() -> bool:
    add = ["tc", "qdisc", "add", "dev", "lo", "root", "netem"]
    found = subprocess.run(add, capture_output=True).returncode == 0
    if found:
        run("tc", "qdisc", "delete", "dev", "lo", "root")
    return found


def _compiled_relay() -> str:
    """Returns the relay's program, compiled unless this user's cache has it."""
    digest = hashlib.sha256(_RELAY.read_bytes()).hexdigest()[:12]
    cache = Path(platformdirs.user_cache_dir("tfdml"))
    program = cache / f"netlab_relay-{platform.machine()}-{digest}"
    if not program.exists():
        if shutil.which("g++") is None:
            refuse("The relay must be compiled at its first use, which needs g++: install it.")
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            made = Path(scratch) / "relay"
            run("g++", "-std=c++17", "-O2", str(_RELAY), "-o", str(made))
            # Atomic: another lab may be about to start it.
            made.replace(program)
    return str(program)
