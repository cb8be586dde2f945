"""Exceptions in few lines: what was raised, what it says, and where in the user's code."""

import re
import sysconfig
import traceback
from pathlib import Path
from types import FrameType

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


def without_pages(message: str) -> str:
    """Returns what an error of TensorFlow's says, without the pages that say where in a graph."""
    lines = [line for line in message.splitlines() if not _WHERE.match(line)]
    said = " ".join(" ".join(lines).split())
    said = re.sub(r" ?\[Op:\S*\]( name: ?)?$", "", said)
    if not said.startswith(_ASSERTION):
        return said
    # Each thing that an assertion prints is in brackets: sentences, and numbers in their midst.
    parts = re.findall(r"\[([^\[\]]*)\]", said)
    return re.sub(r"(\d) (?=[A-Z])", r"\1. ", " ".join(parts)) or said


def describe_error(error: BaseException) -> str:
    """Returns an exception in a few lines: its type, what it says, and where it was raised."""
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    in_graph = _IN_GRAPH.search(text)
    if in_graph:
        return _describe_error_in_graph(error, in_graph)
    if "Graph execution error:" in text:
        text = without_pages(text)
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


def is_of_python_code(message: str) -> bool:
    """Returns whether an error is that of Python code which a graph has called."""
    return _IN_GRAPH.search(message) is not None


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
