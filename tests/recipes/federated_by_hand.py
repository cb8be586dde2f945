"""Does the recipe's rounds without Flower: trains each client in turn, and takes the mean.

    .venv-flower/bin/python -m tests.recipes.federated_by_hand OUTPUT ROUNDS CLIENTS LIMIT DEVICES

Writes the weights after each round, named as by the recipe.
"""

import sys

import numpy as np

from tests.recipes.cases import recipe


def main(output: str, rounds: int, clients: int, limit: int, devices: int) -> None:
    federated = recipe("federated")
    federated.device_names(devices)  # TensorFlow divides the processor before it is used.
    dataset = federated.load("digits", limit)
    parts = federated.split(dataset.y, clients, alpha=0.5)
    shares = np.array([len(rows) for rows in parts]) / len(dataset.y)
    weights = federated.initial_model(dataset.x.shape[1:]).get_weights()
    history = [weights]
    for number in range(1, rounds + 1):
        trained = [
            federated.train(
                weights, dataset.x[rows], dataset.y[rows], 1, devices, clients * number + client
            )
            for client, rows in enumerate(parts)
        ]
        weights = [
            sum(share * own for share, own in zip(shares, ws, strict=True))
            for ws in zip(*trained, strict=True)
        ]
        history.append(weights)
    np.savez(output, **{f"{r} {i}": w for r, ws in enumerate(history) for i, w in enumerate(ws)})
    print(*shares)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
