"""Which line of the user's code is running, for messages."""

from __future__ import annotations

import functools
import linecache
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import jax
import numpy
import torch

# Where a source line is not the user's.
_NOT_USERS = (*(Path(str(module.__file__)).parent for module in (torch, jax, numpy)), Path(__file__).parents[2])
_STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))


class Line(NamedTuple):
    """A line of the user's code, and the function that it is in."""

    file: str
    number: int
    function: str
    text: str


def running_line(frames: Iterable[FrameType] | None = None) -> Line | None:
    """The line of the user's code that is running.

    Args:
      frames: where to look, the innermost first; default: where Python is now.
    """
    for frame in running_frames() if frames is None else frames:
        code, number = frame.f_code, frame.f_lineno
        if is_users(code.co_filename):
            text = linecache.getline(code.co_filename, number).strip()
            return Line(code.co_filename, number, code.co_name, text)
    return None


def source_line(frames: Iterable[FrameType] | None = None) -> str:
    """The line of the user's code that is running, as part of a message; `frames` as for `running_line`."""
    line = running_line(frames)
    return f'\n  File "{line.file}", line {line.number}, in {line.function}\n    {line.text}' if line else ""


def running_frames() -> Iterator[FrameType]:
    """The frames of this thread, the innermost first."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        yield frame
        frame = frame.f_back


@functools.lru_cache(maxsize=1024)
def is_users(filename: str) -> bool:
    """Whether code of this file is the user's, and not torch's, jaxfn's or Python's."""
    path = Path(filename)
    if filename.startswith("<") or any(map(path.is_relative_to, _NOT_USERS)):
        return False
    is_standard = path.is_relative_to(_STANDARD_LIBRARY)
    return not is_standard or "site-packages" in path.relative_to(_STANDARD_LIBRARY).parts
