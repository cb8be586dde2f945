"""Runs a command on N "hosts" of this machine, with a network of a given rate between them.

    tools/netlab --hosts 2 --rate 100mbit -- python train.py
    tools/netlab --hosts 4 --rate 1gbit --job horovod -- python train.py
    tools/netlab --hosts 2 --ranks 2 --rate 100mbit --job horovod -- python train.py

A host is a network namespace with an address, a name and one interface, `eth0`, on a common bridge;
`tc` shapes its outgoing traffic to the rate. On host I of N the command finds

    NETLAB_HOST=I   NETLAB_HOSTS=N   NETLAB_ADDRESSES=10.77.0.1,10.77.0.2,...

and its name, `hostI`, resolves to its address. A host runs the command once, or as often as
`--ranks` says: "2" on each host, "2,1" twice on the first and once on the second. These *ranks* are
numbered host by host, in NETLAB_RANK and NETLAB_RANKS. With `--job horovod` they are those of a
Horovod job; with `--job multi-worker`, workers of a TensorFlow cluster, set by TF_CONFIG. The first
rank that fails ends the others, and its exit code is the tool's.

`--latency`, `--loss` and `--outage` make a worse network:

    tools/netlab --rate 1gbit --latency 5ms --loss 0.1% --congestion cubic -- python train.py
    tools/netlab --latency 50ms --outage host1:20s:10s --outage host0:60s -- python train.py

What leaves a host arrives later by the latency; a ping takes twice as long. In an outage nothing
leaves or reaches the host: connections wait. Its times are from the start of the command, or, with
`--outages-after FILE`, from when that file exists, which the command may create. The kernel's netem
makes latency and losses where it exists. Elsewhere, or with `--relay`, a relay takes the place of
the bridge: a C++ program, compiled (g++) at its first use; `eth0` is a TUN device. It treats what
the lab itself sends, at 10.77.0.254, as it does hosts. Its losses are of packets of 1,500 bytes,
and the same for the same packets and `--seed`. Behind `tc` alone the first 128 KB after a pause
pass at once; the relay gives them their time too, so `--relay` is the better network for small
messages even without latency.

Queues: a host's holds 50 ms of its rate, the relay's 256 MB, as much as 0.2 s of 10 Gbit/s; what
finds them full is dropped. With a latency, TCP's buffers may grow to 64 MB and so never limit a
connection. At the end the tool prints on stderr what a figure should tell: the relay's processor
time, which the job does not get, TCP's congestion control, and how many packets were dropped or
lost.

Nothing is left behind, whatever ends the tool: bridge, relay, the namespaces, the names and all
processes live in the tool's own namespaces, which the kernel removes with their last process, and
the death of the tool's process kills the others. It needs root, for namespaces and shaping; the
machine's own network is not touched. Only Linux, only this machine.
"""

import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from netlab_links import SWITCH, Links, Outage, Quality, address, outage_of, refuse, run

# From <linux/sched.h> and <linux/prctl.h>.
_NEW_MOUNTS, _NEW_NAMES, _NEW_PROCESSES, _NEW_NETWORK = 0x20000, 0x4000000, 0x20000000, 0x40000000
_PR_SET_PDEATHSIG = 1
_PORT = 12000
# Seconds that the other ranks get after one has failed.
_GRACE = 10.0


class Job(str, Enum):
    """Kinds of jobs that the hosts' commands form."""

    NONE = "none"
    HOROVOD = "horovod"
    MULTI_WORKER = "multi-worker"


def enter_own_namespaces() -> None:
    """Returns in a child with its own namespaces; the parent waits, and kills it by dying.

    The child is the first process of its namespaces: when it ends, the kernel ends all others.
    """
    missing = [
        tool for tool in ("unshare", "mount", "ip", "tc", "bridge") if not shutil.which(tool)
    ]
    if missing:
        refuse(f"needs {', '.join(missing)}: install util-linux and iproute2.")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNTS | _NEW_NAMES | _NEW_PROCESSES | _NEW_NETWORK):
        refuse(
            f"`tools/netlab` must run as root and be allowed to make namespaces, to shape the "
            f"traffic between them. Received: user id {os.geteuid()}, "
            f"{os.strerror(ctypes.get_errno())}. Run it by sudo; in a container, one that was "
            f"started with --privileged."
        )
    parent = os.getpid()
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # /proc still shows the outer namespace, so it reveals a parent that has already died.
    if not Path(f"/proc/{parent}").exists():
        os._exit(1)
    run("mount", "--make-rprivate", "/")
    run("mount", "-t", "proc", "proc", "/proc")


def ranks_of(text: str, hosts: int) -> list[int]:
    """Returns the number of ranks of each host from `--ranks`."""
    numbers = text.split(",")
    if not all(n.isdecimal() and int(n) > 0 for n in numbers) or len(numbers) not in (1, hosts):
        refuse(
            f"`--ranks` must be a positive number, or one for each of the {hosts} hosts, such as "
            f"2,1. Received: {text!r}."
        )
    return [int(n) for n in numbers] * (hosts if len(numbers) == 1 else 1)


def environments(ranks: Sequence[int], job: Job) -> list[dict[str, str]]:
    """Returns the environment variables of each rank, host by host."""
    addresses = ",".join(address(i) for i in range(len(ranks)))
    lab = {"NETLAB_HOSTS": str(len(ranks)), "NETLAB_ADDRESSES": addresses}
    hosts = [host for host, own in enumerate(ranks) for _ in range(own)]
    each = [
        {**lab, "NETLAB_HOST": str(host), "NETLAB_RANK": str(rank), "NETLAB_RANKS": str(len(hosts))}
        for rank, host in enumerate(hosts)
    ]
    if job is Job.MULTI_WORKER:
        cluster = {"worker": [f"host{host}:{_PORT + rank}" for rank, host in enumerate(hosts)]}
        for rank, own in enumerate(each):
            own["TF_CONFIG"] = json.dumps(
                {"cluster": cluster, "task": {"type": "worker", "index": rank}}
            )
    if job is Job.HOROVOD:
        for own, horovod in zip(each, _horovod(ranks), strict=True):
            own.update(horovod)
    return each


def _horovod(ranks: Sequence[int]) -> list[dict[str, str]]:
    """Replaces `horovodrun` for the ranks of each host; the rendezvous server is at the switch."""
    from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
    from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()
    port = server.start()
    infos = [HostInfo(f"host{i}", own) for i, own in enumerate(ranks)]
    slots = get_host_assignments(infos, sum(ranks))
    server.init(slots)
    common = create_run_env_vars(SWITCH, ["eth0"], port)
    each = [{**common, **create_slot_env_vars(slot)} for slot in slots]
    return [{name: str(value) for name, value in own.items()} for own in each]


def start(host: int, command: Sequence[str], variables: dict[str, str]) -> subprocess.Popen:
    """Starts the command on a host, under the host's name."""
    script = f'hostname host{host}; exec "$@"'
    inside = ["ip", "netns", "exec", f"host{host}", "unshare", "--uts", "sh", "-c", script, "sh"]
    return subprocess.Popen(
        [*inside, *command], env={**os.environ, **variables}, stdin=subprocess.DEVNULL
    )


def wait(
    started: Sequence[subprocess.Popen],
    links: Links,
    outages: Sequence[Outage],
    outages_after: Path | None,
) -> int:
    """Waits for all ranks, and cuts off hosts meanwhile.

    Args:
        started: The ranks.
        links: The network between their hosts.
        outages: Times in which hosts are cut off.
        outages_after: File from whose creation on these times count; None for the start.

    Returns:
        The exit code of the first rank that failed, or 0.
    """
    changes = [(outage.begin, outage.host, False) for outage in outages]
    changes += [(outage.end, outage.host, True) for outage in outages if outage.end is not None]
    changes.sort()
    begin = time.monotonic() if outages_after is None else None
    first, deadline = 0, None
    # A list, so that each is polled: a rank that hangs must not hide that others have failed.
    while None in [p.poll() for p in started]:
        if begin is None and outages_after.exists():
            begin = time.monotonic()
        while begin is not None and changes and time.monotonic() >= begin + changes[0][0]:
            _, host, connected = changes.pop(0)
            links.connect(host, connected)
        time.sleep(0.05)
        links.check()
        failed = [p.returncode for p in started if p.returncode]
        if failed and deadline is None:
            first, deadline = failed[0], time.monotonic() + _GRACE
        if deadline is not None and time.monotonic() > deadline:
            break
    codes = [first, *(p.returncode for p in started if p.returncode)]
    code = next((c for c in codes if c), 0)
    return 128 - code if code < 0 else code


def main(
    command: Annotated[list[str], typer.Argument(help="What runs on every host.")],
    hosts: Annotated[int, typer.Option(min=1, max=200, help="Number of hosts.")] = 2,
    rate: Annotated[str, typer.Option(help="Of what leaves a host: 100mbit, 1gbit.")] = "",
    latency: Annotated[str, typer.Option(help="Of what leaves a host: 5ms.")] = "",
    loss: Annotated[str, typer.Option(help="Of what leaves a host: 0.1%.")] = "",
    outage: Annotated[
        list[str] | None, typer.Option(help="Host, begin, duration: host1:20s:10s; or host1:20s.")
    ] = None,
    outages_after: Annotated[
        Path | None, typer.Option(help="File whose creation begins the times of outages.")
    ] = None,
    relay: Annotated[
        bool, typer.Option("--relay", help="A relay of our own even if the kernel has netem.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the relay's losses.")] = 0,
    congestion: Annotated[
        str, typer.Option(help="TCP's congestion control: cubic, bbr. By default the machine's.")
    ] = "",
    job: Annotated[Job, typer.Option(help="Kind of job: variables that its ranks get.")] = Job.NONE,
    ranks: Annotated[str, typer.Option(help="Ranks on each host: 2, or 2,1.")] = "1",
) -> None:
    """Runs a command on hosts with a slow network between them; leaves nothing behind."""
    each_host = ranks_of(ranks, hosts)
    outages = [outage_of(text, hosts) for text in outage or []]
    quality = Quality(rate, latency, loss, relay, seed, congestion)
    enter_own_namespaces()
    links = Links(hosts, quality)
    each = environments(each_host, job)
    started = [start(int(own["NETLAB_HOST"]), command, own) for own in each]
    code = wait(started, links, outages, outages_after)
    if summary := links.summary():
        print(f"netlab: {summary}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    # The kernel ends everything that is left, including the rendezvous server's threads.
    os._exit(code)


if __name__ == "__main__":
    # Each indented example becomes a paragraph: lines of one paragraph would be joined.
    page = re.sub(r"\n(?=    \S)", "\n\n", __doc__)
    app = typer.Typer(rich_markup_mode="markdown", add_completion=False)
    app.command(help=page)(main)
    app()
