"""`tfdml serve`: runs a worker or parameter server of a `ParameterServerStrategy`."""

from typing import Annotated

import typer


def serve(
    start_limit: Annotated[
        float, typer.Option(min=0.1, help="Seconds to wait for the chief to start.")
    ] = 600.0,
    silence_limit: Annotated[
        float, typer.Option(min=0.1, help="Seconds of silence after which the chief is lost.")
    ] = 60.0,
) -> None:
    """Serve as a worker or parameter server of a `ParameterServerStrategy`.

    For example:

    `tfdml serve`

    `tfdml serve --start-limit 3600`

    `TF_CONFIG` sets the role. On one machine `tfdml launch --ps` runs this command.

    The training script runs only on the chief, with `tfdml.ParameterServerStrategy`. This
    command runs everywhere else, before or after the chief has started. It exits with 0 when the
    chief is done, and with 70 when the chief is lost or has failed.

    TensorFlow's servers are **not authenticated**: anyone who reaches their ports can run code. Use
    a private network.
    """
    from tfdml.runtime.servers import server, server_task

    try:
        code = server.serve(server_task.task_from_environment(), start_limit, silence_limit)
    except (ValueError, OSError) as error:
        typer.echo(f"tfdml serve: {error}", err=True)
        raise typer.Exit(2) from error
    server.leave(code)
