"""Which stack frames an error shows: those of user code."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, cast

import jax

_OWN_FOLDER = str(Path(__file__).parent)


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
