"""What a derivative check asks of the Functions that it goes through, and what they tell it.

While a `Watch` is in force, each outermost Function call says which Function it is; an `undecorated` one moreover runs
as its bare `forward`, which JAX then differentiates by its operations.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax


@dataclass(eq=False)
class Watch:
    """Observes one tracing of a function. It is part of JAX's cache keys, so each one sees everything anew.

    Attributes:
      undecorated: whether outermost Functions run without their rule.
      functions: the Functions that were called, in order, each once.
      casts: what `backward` returned in another dtype than its input's: (where, returned, wanted).
    """

    undecorated: bool
    functions: dict[Any, None] = field(default_factory=dict[Any, None])
    casts: dict[tuple[str, str, str], None] = field(default_factory=dict[tuple[str, str, str], None])


WATCH: Any = jax.make_user_context(default_value=None)
"""Its `value` is the `Watch` in force, if any; it is read at every call of a Function. `with WATCH(watch):` sets it."""
