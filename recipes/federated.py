"""Federated learning with Flower: clients train by `fit` under a strategy, and keep their images.

    pip install "flwr[simulation]"
    python recipes/federated.py                           # FedAvg
    python recipes/federated.py --aggregation fedadam
    python recipes/federated.py --secure                  # the server sees sums alone
    python recipes/federated.py --noise 0.05              # clipped updates, noise in their mean

Flower samples the clients, sends the weights and aggregates; docs/federated.md says which of its
parts do what. A client is a `tfdml.MirroredStrategy` on the devices of its machine. Each has other
classes than the rest: how much so is set by `--alpha`. This file simulates all clients.
"""

import dataclasses
import functools
import logging
from pathlib import Path
from typing import Annotated

import flwr.client
import flwr.server
import images
import keras
import numpy as np
import typer
from flwr.client.mod import fixedclipping_mod, secaggplus_mod
from flwr.common import ndarrays_to_parameters
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.simulation import run_simulation
from large_batch import build_model
from pipeline import devices as device_names

import tfdml

Weights = list[np.ndarray]
AGGREGATIONS = {
    "fedavg": flwr.server.strategy.FedAvg,
    "fedadam": functools.partial(flwr.server.strategy.FedAdam, eta=0.02, tau=1e-3),
}
CLIPPING_NORM = 1.0  # Length of a client's update, if noise is added.


@functools.cache
def load(source: str, limit: int | None) -> images.Images:
    """Returns the images, which a process loads once."""
    return images.load_or_exit(source, limit)


def split(classes: np.ndarray, clients: int, alpha: float) -> list[np.ndarray]:
    """Returns each client's rows: of each class, a part drawn from a Dirichlet distribution.

    Args:
        classes: Class of each row, of shape (rows,).
        clients: Number of clients.
        alpha: Large for equal parts; the smaller, the fewer classes a client has.
    """
    rng = np.random.default_rng(0)
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for number in np.unique(classes):
        rows = rng.permutation(np.flatnonzero(classes == number))
        ends = np.cumsum(rng.dirichlet([alpha] * clients))[:-1] * len(rows)
        for part, own in zip(parts, np.split(rows, ends.astype(int)), strict=True):
            part.append(own)
    return [np.concatenate(part) for part in parts]


def initial_model(shape: tuple[int, ...]) -> keras.Model:
    """Returns the server's model, with the weights that training begins with.

    Args:
        shape: Shape of one image.
    """
    keras.utils.set_random_seed(0)
    model = build_model(shape, classes=10)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(loss=loss, metrics=["accuracy"])
    return model


@functools.cache
def compiled_model(shape: tuple[int, ...], devices: int) -> keras.Model:
    """Returns a client's model; a process makes one, since plain SGD keeps nothing between rounds.

    Args:
        shape: Shape of one image.
        devices: Devices of the client's machine.
    """
    with tfdml.MirroredStrategy(device_names(devices)).scope():
        model = build_model(shape, classes=10)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
    return model


def train(
    weights: Weights, x: np.ndarray, y: np.ndarray, epochs: int, devices: int, seed: int
) -> Weights:
    """Returns the weights that a client makes of the server's.

    Args:
        weights: The server's weights.
        x: The client's images.
        y: Their classes.
        epochs: Passes over the images.
        devices: Devices of the client's machine.
        seed: Seed of the order of the images.
    """
    model = compiled_model(x.shape[1:], devices)
    keras.utils.set_random_seed(seed)  # After the model is built, which draws numbers, too.
    model.set_weights(weights)
    model.fit(x, y, batch_size=32, epochs=epochs, verbose=0)
    return model.get_weights()


@dataclasses.dataclass
class Client(flwr.client.NumPyClient):
    """Client that trains on its own images.

    Attributes:
        number: Its number, from 0.
        clients: Number of clients.
        alpha: As in `split`.
        epochs: Passes over its images in a round.
        devices: Devices of its machine.
        alike: Whether all clients count alike, as Flower's noise assumes, else by their images.
        data: Arguments of `load`.
    """

    number: int
    clients: int
    alpha: float
    epochs: int
    devices: int
    alike: bool
    data: tuple[str, int | None]

    def fit(self, parameters: Weights, config: dict) -> tuple[Weights, int, dict]:
        """Returns what training makes of the server's weights, and how much it counts."""
        dataset = load(*self.data)
        rows = split(dataset.y, self.clients, self.alpha)[self.number]
        seed = self.clients * config["round"] + self.number
        x, y = dataset.x[rows], dataset.y[rows]
        weights = train(parameters, x, y, self.epochs, self.devices, seed)
        return weights, 1 if self.alike else len(rows), {}


def main(
    aggregation: Annotated[str, typer.Option(help=", ".join(AGGREGATIONS))] = "fedavg",
    secure: Annotated[bool, typer.Option(help="Sum by SecAgg+.")] = False,
    noise: Annotated[
        float, typer.Option(min=0, help="Noise in the mean, for clipped updates of length 1.")
    ] = 0.0,
    clients: Annotated[int, typer.Option(min=2, help="Number of clients.")] = 5,
    fraction: Annotated[float, typer.Option(help="Part of the clients in each round.")] = 1.0,
    alpha: Annotated[float, typer.Option(help="The smaller, the less alike clients are.")] = 0.5,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of training.")] = 8,
    epochs: Annotated[int, typer.Option(min=1, help="A client's passes in a round.")] = 1,
    devices: Annotated[int, typer.Option(min=1, help="Devices of a client's machine.")] = 1,
    limit: Annotated[int | None, typer.Option(min=1, help="Use the first images.")] = 12_000,
    data: Annotated[str, typer.Option(help=f"auto, {', '.join(images.SOURCES)}.")] = "auto",
    output: Annotated[Path | None, typer.Option(help="Write each round's weights here.")] = None,
) -> None:
    """Train on clients that keep their images, by Flower's simulation."""
    if aggregation not in AGGREGATIONS:
        raise typer.BadParameter(f"--aggregation must be one of {', '.join(AGGREGATIONS)}.")
    logging.getLogger("flwr").setLevel(logging.WARNING)
    dataset = load(data, limit)
    model = initial_model(dataset.x.shape[1:])
    history: list[Weights] = []

    def evaluate(number: int, weights: Weights, config: dict) -> tuple[float, dict]:
        history.append(weights)
        model.set_weights(weights)
        loss, accuracy = model.evaluate(dataset.x_val, dataset.y_val, 1000, verbose=0)
        typer.echo(f"{f'round {number}' if number else 'before'}: accuracy {accuracy:.4f}")
        return loss, {"accuracy": accuracy}

    sampled = max(2, int(clients * fraction))
    strategy = AGGREGATIONS[aggregation](
        fraction_fit=fraction,
        fraction_evaluate=0.0,
        min_available_clients=clients,
        evaluate_fn=evaluate,
        on_fit_config_fn=lambda number: {"round": number},
        initial_parameters=ndarrays_to_parameters(model.get_weights()),
    )
    mods = [secaggplus_mod] if secure else []
    if noise:
        private = flwr.server.strategy.DifferentialPrivacyClientSideFixedClipping
        strategy = private(strategy, noise, CLIPPING_NORM, sampled)
        mods.append(fixedclipping_mod)
    most = 1 if noise else max(map(len, split(dataset.y, clients, alpha)))
    sums = SecAggPlusWorkflow(1.0, 0.5, max_weight=float(most)) if secure else None
    server = flwr.server.ServerApp()

    @server.main()
    def serve(grid: flwr.server.Grid, context: flwr.common.Context) -> None:
        config = flwr.server.ServerConfig(num_rounds=rounds)
        DefaultWorkflow(fit_workflow=sums)(
            grid, flwr.server.LegacyContext(context, config, strategy)
        )

    def make_client(context: flwr.common.Context) -> flwr.client.Client:
        number = int(context.node_config["partition-id"])
        own = Client(number, clients, alpha, epochs, devices, noise > 0, (data, limit))
        return own.to_client()

    app = flwr.client.ClientApp(make_client, mods=mods)
    resources = {"num_cpus": 1, "num_gpus": 0.0}
    run_simulation(server, app, clients, backend_config={"client_resources": resources})
    if output is not None:
        names = {f"{r} {i}": w for r, ws in enumerate(history) for i, w in enumerate(ws)}
        np.savez(output, **names)


if __name__ == "__main__":
    # Flower's workers import the clients' code from this file, which a main program's is not.
    import federated

    typer.run(federated.main)
