"""The variables of a model in training: weights, optimizers, metrics, seeds of layers."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tfdml.callbacks.checkpoint.layout import MODEL, layout_changes
from tfdml.checkpointing import Files
from tfdml.checkpointing.names import DEALT
from tfdml.checkpointing.stored_tables import StoredTables
from tfdml.strategies.fit_session import get_session
from tfdml.strategies.parameter_server.partition import (
    assign_blocks,
    is_in_parts,
    is_partitioned,
    joined,
    parts_of,
    shape_of_whole,
    split_among,
    whole_slots,
)
from tfdml.strategies.parameter_server.server_tables import ServerTables, tables_on_servers
from tfdml.strategies.replicas.rank_state import assign_values, values_of
from tfdml.strategies.replicas.step_state import components
from tfdml.strategies.sharded.variable_parts import (
    is_dealt,
    join_dealt,
    own_numbers,
    ownership_of,
    part_of_whole,
    whole_shapes,
)


class ModelState:
    """A model's variables by name, and the layout that a resumed training must match.

    Args:
        model: A built, compiled model.
    """

    def __init__(self, model: keras.Model):
        metrics = {id(v) for v in model.metrics_variables}
        # The variables of a layer's metrics must not be treated as weights.
        weights = [v for v in model.variables if id(v) not in metrics]
        # Each variable as its parts on parameter servers: itself alone if it is not partitioned.
        self._parts = {MODEL: [parts_of(v) if is_partitioned(v) else [v] for v in weights]}
        self._optimizers = _optimizers_of(model)
        for name, optimizer in self._optimizers.items():
            if not optimizer.built:
                optimizer.build(model.trainable_variables)
            self._parts[name] = whole_slots(optimizer.variables)
        self._parts["metrics"] = [[v] for v in model.metrics_variables]
        self._groups = {g: [parts[0] for parts in whole] for g, whole in self._parts.items()}
        self._copies = {
            g: [[components(part) for part in parts] for parts in whole]
            for g, whole in self._parts.items()
        }
        # The shapes of whole variables; this rank may have a part only.
        self._shapes = {
            g: [shape_of_whole(parts) for parts in whole] for g, whole in self._parts.items()
        }
        for name in (MODEL, *self._optimizers):
            if any(ownership_of(v) for v in self._groups[name]):
                collective = model.distribute_strategy.extended.collective
                self._shapes[name] = whole_shapes(self._groups[name], collective)
        # Read now, as the program created them, because training changes a learning rate.
        self._architecture = _architecture(model)
        self._strategy = model.distribute_strategy
        # Set by `leave_tables_to_servers`.
        self._tables: ServerTables | None = None
        self._configs = {name: _config(o) for name, o in self._optimizers.items()}
        self._made_rates = {name: _rate(o) for name, o in self._optimizers.items()}
        # Set by `check` if changes are accepted.
        self._kept_groups: set[str] = set()
        self._rates: dict[str, float] = {}

    def leave_tables_to_servers(
        self, files: Files, directory: str, say: Callable[[str], None]
    ) -> ServerTables | None:
        """Has parameter servers save and load the partitioned variables from now on, if they can.

        Args:
            files: File system of the checkpoints.
            directory: Directory of the checkpoints.
            say: Function called with messages for the user.

        Returns:
            The variables that are no longer in `read`; None if there are none.
        """
        tables = {
            f"{group}/{i}": parts
            for group, whole in self._parts.items()
            for i, parts in enumerate(whole)
            if is_in_parts(parts)
        }
        self._tables = tables_on_servers(tables, self._strategy, files, directory, say)
        return self._tables

    def layout(self) -> dict[str, Any]:
        """Returns data for JSON: each variable's path, shape and dtype, and the configurations.

        The architecture is None for models without a configuration, as many subclassed ones are.
        """
        groups = {
            group: [
                [v.path, list(shape), str(v.dtype)]
                for v, shape in zip(variables, self._shapes[group], strict=True)
            ]
            for group, variables in self._groups.items()
        }
        return {
            "variables": groups,
            "optimizers": self._configs,
            "architecture": self._architecture,
        }

    def read(self) -> dict[str, np.ndarray]:
        """Returns the values that all ranks have, by group and index; see `values_of`."""
        found = {}
        on_servers = self._tables.names if self._tables is not None else ()
        for group, copies in self._copies.items():
            for i, variable in enumerate(self._groups[group]):
                if ownership_of(variable) is None and f"{group}/{i}" not in on_servers:
                    values = values_of(copies[i], summed=group == "metrics")
                    found[f"{group}/{i}"] = joined(values)
        return found

    def read_parts(self) -> dict[str, np.ndarray]:
        """Returns this rank's parts of divided variables, flat, by group and index."""
        found = {}
        for group, variables in self._groups.items():
            for i, variable in enumerate(variables):
                own = own_numbers(variable) if ownership_of(variable) else None
                if own is not None:
                    found[f"{group}/{i}{DEALT * is_dealt(variable)}"] = own
        return found

    def restore(
        self,
        arrays: dict[str, np.ndarray],
        parts: Sequence[Mapping[str, np.ndarray]] = (),
        tables: StoredTables | None = None,
    ) -> None:
        """Assigns the values that were read, but for accepted changes; see `check`.

        Args:
            arrays: The values that `read` returned.
            parts: The parts that each rank's `read_parts` returned, in rank order, for any number
                of ranks. Of divided tables those that this rank needs are asked for.
            tables: The tables that parameter servers have saved.
        """
        on_servers = []
        for group, copies in self._copies.items():
            if group in self._kept_groups:
                continue
            for i, variable in enumerate(self._groups[group]):
                name = f"{group}/{i}"
                stored = tables[name] if tables and name in tables else None
                if stored is not None and is_in_parts(self._parts[group][i]):
                    on_servers.append(name)
                    continue
                value = arrays.get(name) if stored is None else stored[:]
                value = _own_value(variable, value, parts, name, self._shapes[group][i])
                if value is not None:
                    values = split_among(self._parts[group][i], value)
                    assign_values(copies[i], values, summed=group == "metrics")
        if on_servers:
            self._restore_tables(tables, on_servers)
        self._restore_rates()

    def _restore_tables(self, tables: StoredTables, names: Sequence[str]) -> None:
        """Restores partitioned variables from what servers have saved."""
        if self._tables is not None:
            self._tables.load(tables, names)
            return
        for name in names:
            group, _, i = name.rpartition("/")
            assign_blocks(self._parts[group][int(i)], tables[name])

    def check(self, saved: dict[str, Any], path: str, accepts: bool = False) -> list[str]:
        """Checks that a checkpoint belongs to this model and optimizer.

        Args:
            saved: The checkpoint's layout.
            path: The checkpoint's path, for messages.
            accepts: Whether everything but the model may differ. Groups of variables that do not
                fit then keep their values, and a learning rate is the program's.

        Returns:
            The accepted differences, in words.

        Raises:
            ValueError: If it does not belong to them; the message names the first difference.
        """
        changes = layout_changes(self.layout(), saved)
        refused = [c for c in changes if not accepts or (c.group == MODEL and not c.fits)]
        if refused:
            accept = ' or pass on_change="accept", which says what is lost' * any(
                c.group != MODEL or c.fits for c in refused[:1]
            )
            raise ValueError(
                f"The model and its optimizer must be those that {path} was saved with. Received: "
                f"{refused[0].what}. Change it back, train in another directory{accept}; `tfdml "
                f"checkpoints export` writes the checkpoint's weights to a file for `load_weights`."
            )
        self._kept_groups = {c.group for c in changes if not c.fits}
        if any(c.group in self._optimizers for c in changes):
            self._rates = {n: r for n, r in self._made_rates.items() if r is not None}
        return [
            c.what if c.fits else f"{c.what}: {c.group} begins without its state" for c in changes
        ]

    @property
    def has_other_optimizers(self) -> bool:
        """True if an optimizer does not get its state from the checkpoint that was checked last."""
        return any(name in self._kept_groups for name in self._optimizers)

    def _restore_rates(self) -> None:
        """Gives optimizers the learning rates of the program, if their configuration changed."""
        for name, rate in self._rates.items():
            self._optimizers[name].learning_rate = rate


def _own_value(
    variable: keras.Variable,
    whole: np.ndarray | None,
    parts: Sequence[Mapping[str, np.ndarray]],
    name: str,
    shape: tuple[int, ...],
) -> np.ndarray | None:
    """Returns what this rank has of a variable's value; None if it has nothing.

    Args:
        variable: The variable.
        whole: The whole value; None if ranks have written parts of it.
        parts: The parts that each rank has written, by name, in rank order.
        name: The variable's name.
        shape: The shape of the whole.
    """
    ownership = ownership_of(variable)
    if whole is None and is_dealt(variable) and len(parts) == ownership.cut.ranks:
        # The rows that this rank has written, if it has any.
        own = parts[ownership.rank].get(f"{name}{DEALT}")
        if own is not None:
            return np.asarray(own).reshape(ownership.cut.part_shape(ownership.rank))
    if whole is None:
        whole = _from_ranks(parts, name, shape)
    return whole if ownership is None else part_of_whole(variable, whole)


def _from_ranks(
    parts: Sequence[Mapping[str, np.ndarray]], name: str, shape: tuple[int, ...]
) -> np.ndarray:
    """Returns the whole value of a variable of which ranks have written parts.

    Args:
        parts: The parts that each rank has written, by name, in rank order.
        name: The variable's name.
        shape: The shape of the whole.
    """
    dealt = [of_rank[f"{name}{DEALT}"] for of_rank in parts if f"{name}{DEALT}" in of_rank]
    if dealt:
        return join_dealt([np.asarray(part) for part in dealt], shape)
    return np.concatenate([of_rank[name] for of_rank in parts if name in of_rank]).reshape(shape)


def _optimizers_of(model: keras.Model) -> dict[str, keras.Optimizer]:
    found = {"optimizer": model.optimizer}
    for name, value in vars(model).items():
        if isinstance(value, keras.Optimizer) and value is not model.optimizer:
            found[name] = value
    rounds = get_session(model).rounds
    for number, outer in enumerate(rounds.saved.outer_optimizers if rounds is not None else ()):
        found[f"outer_optimizer_{number}"] = outer
    return {n: o for n, o in found.items() if isinstance(o, keras.Optimizer)}


def _architecture(model: keras.Model) -> str | None:
    try:
        return model.to_json()
    except (NotImplementedError, TypeError, ValueError):
        return None


def _rate(optimizer: keras.Optimizer) -> float | None:
    """Returns an optimizer's learning rate; None if a schedule gives it."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    rate = inner.get_config().get("learning_rate")
    return float(rate) if isinstance(rate, int | float) else None


def _config(optimizer: keras.Optimizer) -> dict[str, Any]:
    """Returns an optimizer's configuration as it is after a round trip through JSON."""
    config = keras.saving.serialize_keras_object(optimizer)
    flat = {**config["config"], "class": config["class_name"]}
    flat.pop("name", None)
    return json.loads(json.dumps(flat, default=str))
