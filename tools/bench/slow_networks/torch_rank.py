"""Rank of `tools.bench.slow_networks` with PyTorch or torchft, in a separate environment.

That environment has neither TensorFlow nor typer, and this module's `--help` works without PyTorch.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from datetime import timedelta
from importlib.metadata import version
from typing import Any

from tools.bench.harness import report, threads_each
from tools.bench.slow_networks.model import (
    CANDIDATES,
    DILOCO,
    NONE,
    Candidate,
    rounds_of,
    seconds_of,
    timed_rounds,
)
from tools.bench.slow_networks.torch_training import Training, agree

# Longer than any exchange: torchft drops a round whose exchange takes longer.
PATIENCE = timedelta(seconds=600)
_PORT = 29500


class Averager:
    """What PyTorch's candidates are measured with: `PeriodicModelAverager` on gloo."""

    def __init__(self, network: str, hosts: int) -> None:
        self._new = lambda: Training(network, hosts)

    def exchange(self) -> float:
        """Returns the seconds in which weights are averaged, without steps."""
        import torch.distributed as dist
        from torch.distributed.algorithms.model_averaging.utils import average_parameters

        model = self._new().model
        return seconds_of(lambda: average_parameters(model.parameters(), dist.group.WORLD), agree)

    def run(self, candidate: Candidate, rounds: int) -> dict[str, float]:
        """Returns the means of a candidate's steps."""
        from torch.distributed.algorithms.model_averaging import averagers

        training = self._new()
        averager = averagers.PeriodicModelAverager(candidate.every)

        def step() -> None:
            training.step()
            averager.average_parameters(training.model.parameters())

        # It averages after its first step, and then after each `every`: a round begins here.
        step()
        return timed_rounds(step, candidate, rounds)


class TorchFT:
    """What torchft's candidates are measured with: one lighthouse, and a manager on each host.

    Each host is a group of one rank. All have the same first weights, so none of them has to send
    them to the others.
    """

    def __init__(self, network: str, hosts: int) -> None:
        self._new = lambda: Training(network, hosts)
        self._rank, self._hosts, self._port = int(os.environ["NETLAB_RANK"]), hosts, _PORT

    def exchange(self) -> float:
        """Returns the seconds of a synchronization of LocalSGD, without steps."""
        from torchft.local_sgd import LocalSGD

        training = self._new()
        return self._managed(
            lambda manager: LocalSGD(manager, training.model, training.optimizer, 1),
            lambda local: seconds_of(local.sync, agree),
        )

    def run(self, candidate: Candidate, rounds: int) -> dict[str, float]:
        """Returns the means of a candidate's steps."""
        import torch
        from torchft.local_sgd import DiLoCo, LocalSGD

        training = self._new()
        every = candidate.every

        def method(manager: Any) -> Any:
            if candidate.method != DILOCO:
                return LocalSGD(manager, training.model, training.optimizer, every)
            weights = training.model.parameters()
            outer = torch.optim.SGD(weights, 0.7, momentum=0.9, nesterov=True)
            return DiLoCo(manager, [training.model], training.optimizer, outer, every)

        exchanges = candidate.warm_up // every + rounds
        return self._managed(
            method, lambda made: timed_rounds(training.step, candidate, rounds), exchanges
        )

    def _managed(
        self,
        method: Callable[[Any], Any],
        call: Callable[[Any], Any],
        exchanges: int | None = None,
    ) -> Any:
        """Returns what a call returns in the context of a method.

        Args:
            method: Makes it for a manager.
            call: The call.
            exchanges: Number of exchanges that must have taken place; None if it is not known.

        Raises:
            RuntimeError: If there have been others: torchft goes on after a failed one.
        """
        import torch.distributed as dist
        from torchft import Manager, ProcessGroupGloo
        from torchft.coordination import LighthouseServer

        # Each has its own: no group of an earlier one is waited for.
        self._port += 1
        lighthouse = None
        if self._rank == 0:
            lighthouse = LighthouseServer(f"[::]:{self._port}", min_replicas=self._hosts)
        own = f"host{self._rank}"
        store = dist.TCPStore(own, 0, is_master=True, wait_for_workers=False)
        agree(0.0)
        manager = Manager(
            pg=ProcessGroupGloo(timeout=PATIENCE),
            load_state_dict=lambda state: None,
            state_dict=dict,
            min_replica_size=self._hosts,
            use_async_quorum=False,
            timeout=PATIENCE,
            quorum_timeout=PATIENCE,
            rank=0,
            world_size=1,
            store_addr=own,
            store_port=store.port,
            lighthouse_addr=f"http://host0:{self._port}",
            replica_id=own,
            hostname=own,
            init_sync=False,
        )
        try:
            with method(manager) as made:
                result = call(made)
            done, together = manager.current_step(), manager.num_participants()
            if together != self._hosts or exchanges not in (None, done):
                raise RuntimeError(
                    f"torchft must synchronize {exchanges} times on {self._hosts} hosts. Received: "
                    f"{done} times, the last time on {together}."
                )
            agree(0.0)
        finally:
            manager.shutdown(wait=False)
            if lighthouse is not None:
                lighthouse.shutdown()
        return result


def main(names: str, network: str) -> None:
    """Times candidates of one framework, separated by semicolons; rank 0 reports the results."""
    import torch
    import torch.distributed as dist

    rank, hosts = int(os.environ["NETLAB_RANK"]), int(os.environ["NETLAB_RANKS"])
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "eth0")
    torch.set_num_threads(threads_each(hosts))
    dist.init_process_group("gloo", init_method=f"tcp://host0:{_PORT}", rank=rank, world_size=hosts)
    candidates = [CANDIDATES[name] for name in names.split(";")]
    framework = candidates[0].framework
    local = Training(network, hosts)
    alone = [seconds_of(local.step, agree)]
    measured = (TorchFT if framework == "torchft" else Averager)(network, hosts)
    exchange, results = measured.exchange(), {}
    for candidate in candidates:
        rounds = rounds_of(candidate.every, alone[0], exchange)
        results[candidate.name] = measured.run(candidate, rounds)
        if rank == 0:
            print(candidate.name, results[candidate.name], file=sys.stderr, flush=True)
    # Before and after: the speed of a machine that is shared changes.
    alone.append(seconds_of(local.step, agree))
    base = {"alone": statistics.mean(alone), "alone each": alone, "exchanges": {NONE: exchange}}
    packages = ("torch", "torchft") if framework == "torchft" else ("torch",)
    base |= {"parameters": local.parameters, "versions": {p: version(p) for p in packages}}
    if rank == 0:
        report({"bases": {framework: base}, "results": results})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", help="Candidates, separated by semicolons.")
    parser.add_argument("--network", default="mlp", help="What is trained: mlp or text.")
    main(**vars(parser.parse_args()))
