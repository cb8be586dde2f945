"""Checkpoints of partitioned variables: each server saves and loads the rows that it has.

The chief tells the servers what to write and to read, and waits for their notes as for those of
other ranks; see `checkpointing/commit.py`.
"""

import concurrent.futures
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdml.checkpointing import Files
from tfdml.checkpointing.commit import PARTIAL, server_member_name
from tfdml.checkpointing.files import remove_tree, write_file
from tfdml.checkpointing.names import ROWS
from tfdml.checkpointing.stored_tables import StoredTables
from tfdml.runtime.servers.remote_calls import call
from tfdml.runtime.servers.server_link import ServerLink
from tfdml.runtime.servers.server_task import SERVER, name_of
from tfdml.runtime.servers.table_service import ANSWER_MARK, LOAD, SAVE, save_request
from tfdml.strategies.parameter_server.partition import part_blocks, parts_of

# Bytes of rows that a server reads at a time.
_SERVER_BYTES = 64 << 20


class ServerTables:
    """Partitioned variables and slots, which their servers save and load.

    Args:
        tables: The parts of each variable, by its name in checkpoints.
        directory: Directory of the checkpoints, which all servers see.
        link: The chief's link to the servers.
        size: Number of servers.
    """

    def __init__(
        self,
        tables: Mapping[str, Sequence[keras.Variable]],
        directory: str,
        link: ServerLink,
        size: int,
    ):
        self._tables, self._directory, self._link, self._size = tables, directory, link, size
        found: dict[int, dict[str, keras.Variable]] = {}
        for name, parts in tables.items():
            first = 0
            for part in parts:
                if part.shape[0]:
                    found.setdefault(_server(part), {})[f"{name}{ROWS}{first}"] = part
                first += part.shape[0]
        # Each server's parts by their names in its member.
        self._parts = dict(sorted(found.items()))

    @property
    def names(self) -> set[str]:
        """Names of the variables."""
        return set(self._tables)

    @property
    def members(self) -> dict[str, str]:
        """File names of the servers' members, by the servers' names in messages."""
        return {name_of(SERVER, s): server_member_name(s, self._size) for s in self._parts}

    @property
    def is_server_lost(self) -> bool:
        """Returns whether a server is lost, so that its member is never written."""
        return bool(self._link.lost_indices(SERVER))

    def save(self, staging: str) -> None:
        """Has all servers write the present values, beside training.

        Args:
            staging: Directory to which the members are written.

        Raises:
            tf.errors.OpError: If a server is lost.
        """

        def save(server: int) -> None:
            parts = self._parts[server]
            member = server_member_name(server, self._size)
            request = save_request(self._directory, staging, member, list(parts))
            with _on(server):
                values = [part._value.read_value() for part in parts.values()]
                call(SAVE, [tf.constant(request), *values], tf.string)

        _each(self._parts, save)

    def load(self, stored: StoredTables, names: Iterable[str]) -> None:
        """Has all servers read their rows of variables.

        Args:
            stored: The tables of a checkpoint.
            names: Names of the variables to load.

        Raises:
            tf.errors.OpError: If a server is lost, or cannot read a file.
        """
        request, names = stored.to_json(), list(names)

        def load(server: int) -> None:
            for name in names:
                for part, own, rows in part_blocks(self._tables[name], _SERVER_BYTES):
                    if _server(part) == server:
                        with _on(server):
                            _load_rows(part, request, name, own, rows)

        _each(self._parts, load)


def tables_on_servers(
    tables: Mapping[str, Sequence[keras.Variable]],
    strategy: tf.distribute.Strategy,
    files: Files,
    directory: str,
    say: Callable[[str], None],
) -> ServerTables | None:
    """Returns the tables that servers save and load; None if they cannot, or there are none.

    Args:
        tables: The parts of each partitioned variable and slot, by its name in checkpoints.
        strategy: Strategy of the model.
        files: File system of the checkpoints.
        directory: Directory of the checkpoints.
        say: Function called with messages for the user.
    """
    if not tables:
        return None
    connection = strategy.connection
    size = len(connection.task.cluster[SERVER])
    found = ServerTables(tables, directory, connection.link, size)
    others = _servers_elsewhere(files, directory, found._parts)
    if not others:
        return found
    names = ", ".join(name_of(SERVER, server) for server in others)
    say(
        f"{names} cannot write to {directory}, so the chief saves the tables, and has them in "
        f"memory meanwhile. Choose a directory that all servers see, or a URL in a store, and run "
        f"`tfdml serve` there: then each server saves the rows that it has."
    )
    return None


def check_servers_see(directory: str, variables: Sequence[keras.Variable]) -> None:
    """Checks that the servers of partitioned variables can write to a directory.

    Args:
        directory: Local directory; created if missing.
        variables: Partitioned variables.

    Raises:
        ValueError: If some cannot; it names them.
    """
    servers = sorted({_server(part) for variable in variables for part in parts_of(variable)})
    others = _servers_elsewhere(Files(), directory, servers)
    if others:
        names = ", ".join(name_of(SERVER, server) for server in others)
        raise ValueError(
            f"Servers write their rows of {variables[0].path}, so all must be able to write to "
            f"`filepath`. Received: {directory}, to which {names} cannot. Choose a directory that "
            f"all servers see, and run `tfdml serve` there; or use `model.save`, which only the "
            f"chief writes."
        )


def _servers_elsewhere(files: Files, directory: str, servers: Iterable[int]) -> list[int]:
    """Returns the servers that do not see the chief's directory, or cannot write to it."""
    # A name of unfinished checkpoints, whose rests are removed.
    place = os.path.join(directory, f"{PARTIAL}marks-{secrets.token_hex(4)}")
    mark, content = os.path.join(place, "chief"), secrets.token_hex(8)

    def answers(server: int) -> bool:
        answer = os.path.join(place, f"server-{server}")
        with _on(server):
            try:
                found = call(ANSWER_MARK, [tf.constant(mark), tf.constant(answer)], tf.string)
            except tf.errors.InvalidArgumentError:  # An earlier tfdml serves there.
                return False
        return found.numpy() == content.encode()

    files.make_directory(place)
    write_file(files, mark, content.encode())
    try:
        return [s for s, found in zip(servers, _each(servers, answers), strict=True) if not found]
    finally:
        remove_tree(files, place)


def _load_rows(part: keras.Variable, request: str, name: str, own: slice, rows: slice) -> None:
    """Assigns rows of a stored table to rows of a part, on the part's server.

    Args:
        part: The part.
        request: Description of the stored tables.
        name: Name of the table.
        own: The rows of the part.
        rows: The rows of the table.
    """
    arguments = [tf.constant(value) for value in (request, name, rows.start, rows.stop)]
    value = call(LOAD, arguments, part._value.dtype)
    part._value.scatter_update(tf.IndexedSlices(value, tf.range(own.start, own.stop)))


def _each(servers: Iterable[int], work: Callable[[int], Any]) -> list[Any]:
    """Runs a function for all servers at once; returns its results."""
    servers = list(servers)
    with concurrent.futures.ThreadPoolExecutor(len(servers)) as pool:
        return list(pool.map(work, servers))


def _server(part: keras.Variable) -> int:
    """Returns the index of the server that has a part."""
    return tf.DeviceSpec.from_string(part._value.device).task


def _on(server: int) -> Iterator[None]:
    """Returns a context in which operations run on a server."""
    return tf.device(f"/job:{SERVER}/replica:0/task:{server}/device:CPU:0")
