"""Which trace a thread is making."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxfn._torch._tracing import Tracing

_THREAD = threading.local()


def current() -> Tracing | None:
    """The innermost trace that this thread is making."""
    return getattr(_THREAD, "tracing", None)


def replace_current(tracing: Tracing | None) -> Tracing | None:
    """Makes another trace the innermost one; returns what it was before."""
    before = current()
    _THREAD.tracing = tracing
    return before
