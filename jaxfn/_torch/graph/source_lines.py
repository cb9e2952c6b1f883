"""The user's line of code that is running, for messages."""

from __future__ import annotations

import functools
import inspect
import linecache
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import jax
import numpy
import torch

# Directories of code that is not the user's.
_LIBRARIES = (*(Path(str(module.__file__)).parent for module in (torch, jax, numpy)), Path(__file__).parents[2])
_STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))


class Line(NamedTuple):
    """A line of the user's code.

    Attributes:
      function: The name of the function around it.
      callable: The innermost function around the line that `ops=` can name, as written in Python: a module or class has
        it as an attribute. `None` if there is none.
    """

    file: str
    number: int
    function: str
    text: str
    callable: str | None


def running_line(frames: Iterable[FrameType] | None = None) -> Line | None:
    """Returns the user's line that is running, in the current frames or in `frames` (the innermost first)."""
    line: Line | None = None
    for frame in running_frames() if frames is None else frames:
        code, number = frame.f_code, frame.f_lineno
        if not is_user_code(code.co_filename):
            continue
        if line is None:
            text = linecache.getline(code.co_filename, number).strip()
            line = Line(code.co_filename, number, code.co_name, text, None)
        name = _importable_name(code, frame.f_globals.get("__name__", ""))
        if name is not None:
            return line._replace(callable=name)
    return line


def source_line(frames: Iterable[FrameType] | None = None) -> str:
    """Returns the line of the user's code that is running, as part of a message; `frames` as for `running_line`."""
    return format_line(running_line(frames))


def format_line(line: Line | None) -> str:
    """Formats a line as part of a message."""
    return f'\n  File "{line.file}", line {line.number}, in {line.function}\n    {line.text}' if line else ""


def ops_hint(line: Line | None) -> str:
    """Returns the hint that `ops=` can name the function around a line, as part of a message."""
    name = None if line is None else line.callable
    return f". Or name a JAX function for the function around it: ops={{{name}: jax_function}}" if name else ""


def running_frames() -> Iterator[FrameType]:
    """Yields the frames of this thread, the innermost first."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        yield frame
        frame = frame.f_back


@functools.lru_cache(maxsize=4096)
def _importable_name(code: CodeType, module: str) -> str | None:
    """Returns the qualified name by which code's function is found in its module; `None` if it is not."""
    found: Any = sys.modules.get(module)
    for part in code.co_qualname.split("."):
        found = getattr(found, part, None)
    if getattr(inspect.unwrap(found) if callable(found) else found, "__code__", None) is not code:
        return None
    return code.co_qualname if module == "__main__" else f"{module}.{code.co_qualname}"


@functools.lru_cache(maxsize=1024)
def is_library_code(filename: str) -> bool:
    """Whether a file belongs to torch, JAX, NumPy or jaxfn."""
    return any(map(Path(filename).is_relative_to, _LIBRARIES))


@functools.lru_cache(maxsize=1024)
def is_user_code(filename: str) -> bool:
    """Whether a file belongs to the user, and not to torch, JAX, jaxfn or Python."""
    path = Path(filename)
    if filename.startswith("<") or is_library_code(filename):
        return False
    is_standard = path.is_relative_to(_STANDARD_LIBRARY)
    return not is_standard or "site-packages" in path.relative_to(_STANDARD_LIBRARY).parts
