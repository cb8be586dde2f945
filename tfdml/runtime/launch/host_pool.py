"""Hosts that a job is restarted on: those that answer, and spares in place of the others."""

import sys
import time
from collections.abc import Sequence

from tfdml.runtime.launch.job_hosts import Host, answers

_POLL_SECONDS = 2.0


class HostPool:
    """Places of a job's ranks, and hot standby hosts that take over those of failed hosts.

    A spare runs as many ranks as the host that it replaces, and the same ones. The host that was
    replaced becomes the last spare, as it may answer again later.

    Args:
        hosts: Hosts and their numbers of ranks, in the order of the ranks.
        spares: Names of the spares, in the order in which they are used.
    """

    def __init__(self, hosts: Sequence[Host], spares: Sequence[str] = ()):
        self._places = list(hosts)
        self._spares = list(spares)

    def wait(self, fewest: int, seconds: float = 300.0) -> list[Host]:
        """Waits until enough hosts answer to restart the job.

        Args:
            fewest: Minimum number of ranks to restart with.
            seconds: Seconds to wait.

        Returns:
            The places whose hosts answer, after spares have taken over others.

        Raises:
            ConnectionError: If they have fewer than `fewest` ranks after `seconds`.
        """
        deadline = time.monotonic() + seconds
        while True:
            there = self._present()
            missing = ", ".join(host.name for host in self._places if host not in there)
            no_spare = f"; no spare is left for {missing}" if missing and self._spares else ""
            ranks = sum(host.ranks for host in there)
            if ranks >= fewest:
                if no_spare:
                    _say(f"no answer from {', '.join(self._spares)}{no_spare}.")
                return there
            if time.monotonic() > deadline:
                raise ConnectionError(
                    f"`--min-workers` processes must have a host that answers, to restart the "
                    f"job. Received: {ranks} of {fewest} after {seconds:.0f} s; no answer from "
                    f"{', '.join([missing, *self._spares])}{no_spare}. Bring these machines back, "
                    f"or ask for fewer."
                )
            time.sleep(_POLL_SECONDS)

    def _present(self) -> list[Host]:
        """Replaces hosts that do not answer by spares that do; returns the places with a host."""
        there = []
        for index, host in enumerate(self._places):
            if answers(host.name):
                there.append(host)
                continue
            spare = next((name for name in self._spares if answers(name)), None)
            if spare is not None:
                self._spares.remove(spare)
                self._spares.append(host.name)
                self._places[index] = Host(spare, host.ranks)
                there.append(self._places[index])
                _say(f"{spare} takes the place of {host.name}, which does not answer.")
        return there


def _say(text: str) -> None:
    print(f"tfdml launch: {text}", file=sys.stderr, flush=True)
