"""Host of the network lab in `tools.bench.parameter_server`: chief, server or worker."""

import json
import os
import sys
from typing import Annotated

import typer

from tools.bench.harness import module_command, start


def main(arguments: Annotated[list[str], typer.Argument(help="What the chief is given.")]) -> None:
    """Runs this host's task: the first host is the chief, the second the server."""
    number = int(os.environ["NETLAB_HOST"])
    addresses = [f"{a}:12000" for a in os.environ["NETLAB_ADDRESSES"].split(",")]
    cluster = {"chief": addresses[:1], "ps": addresses[1:2], "worker": addresses[2:]}
    role = ("chief", "ps")[number] if number < 2 else "worker"
    task = {"type": role, "index": max(0, number - 2)}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
    chief = module_command("tools.bench.parameter_server.chief", *arguments)
    os.execv(
        sys.executable, chief if role == "chief" else module_command("tfdml.cli.main", "serve")
    )


if __name__ == "__main__":
    start(__doc__, main)
