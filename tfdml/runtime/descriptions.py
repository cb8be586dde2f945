"""Short descriptions of exceptions: type, message and the line of the user's code."""

import re
import sysconfig
import traceback
from pathlib import Path
from types import FrameType

# Prefixes of file names whose frames are not the user's code.
_LIBRARIES = (
    str(Path(__file__).resolve().parents[1]),
    *(sysconfig.get_paths()[kind] for kind in ("stdlib", "purelib", "platlib")),
    "<",
)
_LONGEST_ERROR = 2000
# Lines in which TensorFlow reports the graph location of an error.
_WHERE = re.compile(r"\s*(Graph execution error:|Detected at node |File \"|\[\[\{\{)")
_ASSERTION = "assertion failed: "


def without_pages(message: str) -> str:
    """Returns the message of a TensorFlow error without its report of the graph location."""
    lines = [line for line in message.splitlines() if not _WHERE.match(line)]
    text = " ".join(" ".join(lines).split())
    text = re.sub(r" ?\[Op:\S*\]( name: ?)?$", "", text)
    if not text.startswith(_ASSERTION):
        return text
    # An assertion prints each of its items in brackets: sentences, with numbers between them.
    parts = re.findall(r"\[([^\[\]]*)\]", text)
    return re.sub(r"(\d) (?=[A-Z])", r"\1. ", " ".join(parts)) or text


def describe_error(error: BaseException) -> str:
    """Describes an exception in a few lines: type, message and the user's line that raised it."""
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


# TensorFlow's report of an exception in Python code that a graph has called: the code of a
# `numpy_function`, a `py_function` or a generator. The rest of the report is pages long.
_IN_GRAPH = re.compile(
    r"^(?P<error>\S[^\n]*)\n+Traceback \(most recent call last\):\n(?P<frames>.*)", re.M | re.S
)
_FRAME = re.compile(r'File "(.+)", line (\d+), in (\S+)')


def is_of_python_code(message: str) -> bool:
    """Returns whether an error message reports an exception in Python code called by a graph."""
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
    """Returns the innermost Keras callback method in the frames, as "Class.method", or None."""
    for frame in reversed(frames):
        name = frame.f_code.co_name
        if not name.startswith("on_"):
            continue
        owner = frame.f_locals.get("self")
        bases = [(c.__module__.split(".")[0], c.__name__) for c in type(owner).__mro__]
        if ("keras", "Callback") in bases:
            return f"{type(owner).__name__}.{name}"
    return None
