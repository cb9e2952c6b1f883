"""What a derivative check asks of the Functions that it goes through, and what they tell it.

While a `Watch` is in force, each outermost Function call says which Function it is; an `undecorated` one moreover runs
as its bare `forward`, which JAX then differentiates by its operations.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import jax


class Watch:
    """Observes one tracing of a function. It is part of JAX's cache keys, so each one sees everything anew.

    Attributes:
      undecorated: whether outermost Functions run without their rule.
      functions: the Functions that were called, in order, each once.
      casts: what `backward` returned in another dtype than its input's: (where, returned, wanted).
    """

    def __init__(self, *, undecorated: bool) -> None:
        self.undecorated = undecorated
        self.functions: dict[Any, None] = {}
        self.casts: dict[tuple[str, str, str], None] = {}


WATCH: Any = jax.make_user_context(default_value=None)
"""Its `value` is the `Watch` in force, if any; it is read at every call of a Function."""


@contextmanager
def watching(watch: Watch | None) -> Generator[None]:
    """Puts a watch in force, or none."""
    with WATCH(watch):
        yield
