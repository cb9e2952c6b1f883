"""Stack frames of an error: which it shows, those of user code, and which functions it came through."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from traceback import walk_tb
from types import TracebackType
from typing import Any, cast

import jax

_OWN_FOLDER = str(Path(__file__).parent / "_")[:-1]  # with the separator: a neighbour's name may begin alike


def hide_own_frames(error: Exception) -> None:
    """Lets an error show the frames of user code; see `shown_frames`."""
    error.with_traceback(shown_frames(error.__traceback__))  # assigning is what a frozen dataclass would refuse


def came_through(error: Exception, *functions: Callable[..., Any]) -> bool:
    """Whether one of these functions was running when an error was raised, and was called by whoever asks."""
    codes = [getattr(function, "__code__", None) for function in functions]
    return any(frame.f_code in codes for frame, _ in walk_tb(error.__traceback__))


def shown_frames(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback without jaxfn's own frames, as JAX leaves its own out; all of it where JAX is told not to.

    That is `JAX_TRACEBACK_FILTERING=off`.
    """
    if cast(Any, jax.config).jax_traceback_filtering == "off":
        return traceback
    entries: list[TracebackType] = []
    while traceback is not None:
        entries.append(traceback)
        traceback = traceback.tb_next
    shown = None
    for entry in reversed(entries):
        if not entry.tb_frame.f_code.co_filename.startswith(_OWN_FOLDER):
            shown = TracebackType(shown, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return shown
