"""The running line of the user's code, for messages."""

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

# Where a source line is not the user's.
_LIBRARIES = (*(Path(str(module.__file__)).parent for module in (torch, jax, numpy)), Path(__file__).parents[2])
_STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))


class Line(NamedTuple):
    """A line of the user's code, and the function that it is in.

    Attributes:
      callable: the innermost function around it that a module or class has by its name, as that is written in Python;
        one that `ops=` may name. `None` where there is none.
    """

    file: str
    number: int
    function: str
    text: str
    callable: str | None


def running_line(frames: Iterable[FrameType] | None = None) -> Line | None:
    """The line of the user's code that is running.

    Args:
      frames: where to look, the innermost first; default: where Python is now.
    """
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
    """The line of the user's code that is running, as part of a message; `frames` as for `running_line`."""
    return format_line(running_line(frames))


def format_line(line: Line | None) -> str:
    """A line as part of a message."""
    return f'\n  File "{line.file}", line {line.number}, in {line.function}\n    {line.text}' if line else ""


def ops_hint(line: Line | None) -> str:
    """That the function around a line may be named in `ops=`, as part of a message."""
    name = None if line is None else line.callable
    return f". Or name a JAX function to stand for the one around it: ops={{{name}: jax_function}}" if name else ""


def running_frames() -> Iterator[FrameType]:
    """The frames of this thread, the innermost first."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        yield frame
        frame = frame.f_back


@functools.lru_cache(maxsize=4096)
def _importable_name(code: CodeType, module: str) -> str | None:
    """Returns the name by which the function of this code is found in its module; `None` if it is not."""
    found: Any = sys.modules.get(module)
    for part in code.co_qualname.split("."):
        found = getattr(found, part, None)
    if getattr(inspect.unwrap(found) if callable(found) else found, "__code__", None) is not code:
        return None
    return code.co_qualname if module == "__main__" else f"{module}.{code.co_qualname}"


@functools.lru_cache(maxsize=1024)
def is_user_code(filename: str) -> bool:
    """Whether code of this file is the user's, and not torch's, jaxfn's or Python's."""
    path = Path(filename)
    if filename.startswith("<") or any(map(path.is_relative_to, _LIBRARIES)):
        return False
    is_standard = path.is_relative_to(_STANDARD_LIBRARY)
    return not is_standard or "site-packages" in path.relative_to(_STANDARD_LIBRARY).parts
