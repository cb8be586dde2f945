"""The variables of a model in training: weights, optimizers, metrics, seeds of layers."""

import json
import re
from typing import Any

import keras
import numpy as np

from tfdml.strategies.parameter_server.partition import with_parts
from tfdml.strategies.replicas.rank_state import assign_values, values_of
from tfdml.strategies.replicas.step_state import components


class ModelState:
    """A model's variables by name, and the layout that a resumed training must match.

    Args:
        model: A built, compiled model.
    """

    def __init__(self, model: keras.Model):
        # A variable that is partitioned over parameter servers is saved as its parts.
        self._groups = {"model": with_parts(model.variables)}
        self._optimizers = _optimizers_of(model)
        for name, optimizer in self._optimizers.items():
            if not optimizer.built:
                optimizer.build(model.trainable_variables)
            self._groups[name] = list(optimizer.variables)
        metrics = {id(v) for v in model.metrics_variables}
        # The variables of a layer's metrics must not be treated as weights.
        self._groups["model"] = [v for v in self._groups["model"] if id(v) not in metrics]
        self._groups["metrics"] = list(model.metrics_variables)
        self._copies = {g: [components(v) for v in vs] for g, vs in self._groups.items()}
        # Read now, as the program created them, because training changes a learning rate.
        self._architecture = _architecture(model)
        self._configs = {name: _config(o) for name, o in self._optimizers.items()}

    def layout(self) -> dict[str, Any]:
        """Returns data for JSON: each variable's path, shape and dtype, and the configurations.

        The architecture is None for models without a configuration, as many subclassed ones are.
        """
        groups = {
            group: [[v.path, list(v.shape), str(v.dtype)] for v in variables]
            for group, variables in self._groups.items()
        }
        return {
            "variables": groups,
            "optimizers": self._configs,
            "architecture": self._architecture,
        }

    def read(self) -> dict[str, np.ndarray]:
        """Returns all values, by group and index; see `values_of`."""
        found = {}
        for group, copies in self._copies.items():
            values = values_of(copies, summed=group == "metrics")
            found.update({f"{group}/{i}": value for i, value in enumerate(values)})
        return found

    def restore(self, arrays: dict[str, np.ndarray]) -> None:
        """Assigns the values that `read` returned."""
        for group, copies in self._copies.items():
            values = [arrays[f"{group}/{i}"] for i in range(len(copies))]
            assign_values(copies, values, summed=group == "metrics")

    def check(self, saved: dict[str, Any], path: str) -> None:
        """Checks that a checkpoint belongs to this model and optimizer.

        Args:
            saved: The checkpoint's layout.
            path: The checkpoint's path, for messages.

        Raises:
            ValueError: If it does not; the message names the first difference.
        """
        said = self._difference(saved)
        if said:
            raise ValueError(
                f"The model and its optimizer must be those that {path} was saved with. Received: "
                f"{said}. Change it back, or train in another directory; `tfdml "
                f"checkpoints export` writes the checkpoint's weights to a file for `load_weights`."
            )

    def _difference(self, saved: dict[str, Any]) -> str:
        now = self.layout()
        for group in sorted(now["variables"].keys() | saved["variables"].keys()):
            own, other = (s["variables"].get(group, []) for s in (now, saved))
            for mine, theirs in zip(own, other, strict=False):
                if [_without_numbers(mine[0]), *mine[1:]] != [
                    _without_numbers(theirs[0]),
                    *theirs[1:],
                ]:
                    return f"{_in_words(mine)}, before {_in_words(theirs)}"
            if len(own) != len(other):
                return f"{len(own)} variables of {group}, before {len(other)}"
        for name, config in now["optimizers"].items():
            before = saved["optimizers"].get(name, {})
            for key in sorted(config.keys() | before.keys()):
                if config.get(key) != before.get(key):
                    return f"{name} with {key}={config.get(key)!r}, before {before.get(key)!r}"
        return ""


def _optimizers_of(model: keras.Model) -> dict[str, keras.Optimizer]:
    found = {"optimizer": model.optimizer}
    for name, value in vars(model).items():
        if isinstance(value, keras.Optimizer) and value is not model.optimizer:
            found[name] = value
    return {n: o for n, o in found.items() if isinstance(o, keras.Optimizer)}


def _architecture(model: keras.Model) -> str | None:
    try:
        return model.to_json()
    except (NotImplementedError, TypeError, ValueError):
        return None


def _config(optimizer: keras.Optimizer) -> dict[str, Any]:
    """Returns an optimizer's configuration as it is after a round trip through JSON."""
    config = keras.saving.serialize_keras_object(optimizer)
    flat = {**config["config"], "class": config["class_name"]}
    flat.pop("name", None)
    return json.loads(json.dumps(flat, default=str))


def _without_numbers(path: str) -> str:
    """Returns a path without the numbers that distinguish objects of a class in one process."""
    return re.sub(r"_\d+(?=/|$)", "", path)


def _in_words(variable: list) -> str:
    path, shape, dtype = variable
    return f"{path} of shape {tuple(shape)} and dtype {dtype}"
