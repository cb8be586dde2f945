"""Tables of a parameter server, which it saves and loads itself at the chief's calls.

So a table's rows go from the server to the disk or store, and never through the chief.
"""

import functools
import json
import sys

import numpy as np

from tfdml.checkpointing import Writer, open_files
from tfdml.checkpointing.commit import write_for_rank_0
from tfdml.checkpointing.files import write_file
from tfdml.checkpointing.stored_tables import StoredTables
from tfdml.runtime.servers import remote_calls

# Names of the calls.
ANSWER_MARK, SAVE, LOAD = "answer mark", "save tables", "load rows"

_writer = Writer()


def offer_service() -> None:
    """Lets the chief have this process save and load its tables."""
    remote_calls.offer(ANSWER_MARK, _answer_mark)
    remote_calls.offer(SAVE, _save)
    remote_calls.offer(LOAD, _load)


def save_request(directory: str, staging: str, member: str, names: list[str]) -> str:
    """Returns the first argument of `SAVE`; the others are the tensors.

    Args:
        directory: Directory of all checkpoints.
        staging: Directory to which the member is written.
        member: File name of the member.
        names: Names of the tensors.
    """
    return json.dumps(
        {"directory": directory, "staging": staging, "member": member, "names": names}
    )


def _answer_mark(mark: bytes, answer: bytes) -> bytes:
    """Writes a small file's content to another file, and returns it.

    Returns:
        Nothing if this process does not see the one, or cannot write the other.
    """
    try:
        files = open_files(mark.decode())
        content = files.read(mark.decode())
        write_file(files, answer.decode(), content)
    except (OSError, ValueError):
        return b""
    return content


def _save(request: bytes, *tensors: np.ndarray) -> bytes:
    """Starts to write tensors, which later updates do not change; a note says when it is done."""
    given = json.loads(request)
    named = dict(zip(given["names"], tensors, strict=True))
    files = open_files(given["directory"], _say)

    def write() -> None:
        try:
            write_for_rank_0(files, given["staging"], given["member"], named, {})
        except Exception as error:  # noqa: BLE001 (a note has told the chief)
            _say(f"{given['member']} of {given['staging']} could not be written: {error!r}")

    _writer.submit(write)
    return b""


def _load(request: bytes, table: bytes, first: int, last: int) -> np.ndarray:
    """Returns rows of a table in a checkpoint."""
    return _tables(request)[table.decode()][first:last]


@functools.lru_cache(maxsize=1)
def _tables(request: bytes) -> StoredTables:
    return StoredTables.from_json(request.decode(), _say)


def _say(text: str) -> None:
    print(f"tfdml serve: {text}", file=sys.stderr, flush=True)
