"""Exceptions in few lines: what was raised, what it says, and where in the user's code."""

import contextlib
import re
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import tensorflow as tf

from tfdml.runtime.errors import BROKEN

# Frames of files there are not the user's.
_LIBRARIES = (
    str(Path(__file__).resolve().parents[1]),
    *(sysconfig.get_paths()[kind] for kind in ("stdlib", "purelib", "platlib")),
    "<",
)
_LONGEST_ERROR = 2000
# Lines in which TensorFlow tells where in its graph an error was.
_WHERE = re.compile(r"\s*(Graph execution error:|Detected at node |File \"|\[\[\{\{)")
_ASSERTION = "assertion failed: "
# As tfdml's own say what is wrong.
_OWN_ASSERTION = re.compile(_ASSERTION + r".* must .*Received ", re.S)


def said_by(error: tf.errors.OpError) -> str:
    """Returns what an error of TensorFlow's says, without the pages that say where in a graph."""
    lines = [line for line in error.message.splitlines() if not _WHERE.match(line)]
    said = " ".join(" ".join(lines).split())
    said = re.sub(r" ?\[Op:\S*\]( name: ?)?$", "", said)
    if not said.startswith(_ASSERTION):
        return said
    # Each thing that an assertion prints is in brackets: sentences, and numbers in their midst.
    parts = re.findall(r"\[([^\[\]]*)\]", said)
    return re.sub(r"(\d) (?=[A-Z])", r"\1. ", " ".join(parts)) or said


@contextlib.contextmanager
def in_plain_words() -> Iterator[None]:
    """While this is entered, an error of what ranks do together says what it says, and no more.

    That is one of tfdml's assertions, and an exchange that another rank's end has broken. Of any
    other one, the pages that TensorFlow tells besides may be needed.
    """
    try:
        yield
    except (tf.errors.InvalidArgumentError, *BROKEN) as error:
        broken = isinstance(error, BROKEN) and not _IN_GRAPH.search(error.message)
        if not broken and not _OWN_ASSERTION.search(error.message):
            raise
        raise type(error)(None, None, said_by(error)) from None


def describe_error(error: BaseException) -> str:
    """Returns an exception in a few lines: its type, what it says, and where it was raised."""
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    in_graph = _IN_GRAPH.search(text)
    if in_graph:
        return _describe_error_in_graph(error, in_graph)
    if isinstance(error, tf.errors.OpError):
        text = f"{type(error).__name__}: {said_by(error)}"
    if len(text) > _LONGEST_ERROR:
        text = text[:_LONGEST_ERROR] + " ..."
    frames = list(traceback.walk_tb(error.__traceback__))
    callback = _callback_of([frame for frame, _ in frames])
    if callback:
        text += f"\nin callback {callback}"
    own = [
        (f.f_code, line) for f, line in frames if not f.f_code.co_filename.startswith(_LIBRARIES)
    ]
    if own:
        code, line = own[-1]
        text += f"\nat {code.co_filename}:{line} in {code.co_name}"
    return text


# How TensorFlow tells of an exception of Python code that a graph has called: the code of a
# `numpy_function`, a `py_function` or a generator. What it tells besides goes on for pages.
_IN_GRAPH = re.compile(
    r"^(?P<error>\S[^\n]*)\n+Traceback \(most recent call last\):\n(?P<frames>.*)", re.M | re.S
)
_FRAME = re.compile(r'File "(.+)", line (\d+), in (\S+)')


def _describe_error_in_graph(error: BaseException, found: re.Match) -> str:
    text = found["error"][:_LONGEST_ERROR]
    text += f"\nin Python code of the graph ({type(error).__name__})"
    own = [f for f in _FRAME.findall(found["frames"]) if not f[0].startswith(_LIBRARIES)]
    if own:
        file, line, function = own[-1]
        text += f"\nat {file}:{line} in {function}"
    return text


def _callback_of(frames: list[FrameType]) -> str | None:
    """Returns the innermost method of a Keras callback among frames."""
    for frame in reversed(frames):
        name = frame.f_code.co_name
        if not name.startswith("on_"):
            continue
        owner = frame.f_locals.get("self")
        bases = [(c.__module__.split(".")[0], c.__name__) for c in type(owner).__mro__]
        if ("keras", "Callback") in bases:
            return f"{type(owner).__name__}.{name}"
    return None
