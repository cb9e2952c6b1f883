"""The monitor of calls, by which a check sees what Functions do while their derivatives are traced."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from jaxfn._observe import CALL_MONITOR
from jaxfn._traces import staging_trace


@dataclass(eq=False)
class CallMonitor:
    """A monitor of calls: what a check of derivatives learns of each, and how Functions run for the check.

    # Note: JAX's caches

    The active monitor is part of the keys of JAX's caches. Monitors with equal options are equal, so that JAX has the
    jaxprs of jax.numpy's functions from earlier checks, but only as long as the caches have no jaxpr that contains a
    call which the next monitor has to see: after a call in such a jaxpr, new monitors differ from all earlier ones.
    """

    bypass_rules: bool  # whether outermost Functions run as their bare `forward`, which JAX then differentiates
    stops_intermediates: bool = False  # whether saved intermediates have no derivative, as in torch
    # The Functions that were called, in order, each once.
    functions: dict[Any, None] = field(default_factory=dict[Any, None])
    # The gradients that `backward` returned in another dtype than its input's: (where, returned, expected).
    casts: dict[tuple[str, str, str], None] = field(default_factory=dict[tuple[str, str, str], None])
    # The differentiated inputs for which `backward` returned `None`: (method, input).
    without_gradient: dict[tuple[str, str], None] = field(default_factory=dict[tuple[str, str], None])
    # Whether a method may depend on what is differentiated: it read `ctx.needs_input_grad`, or receives `None`.
    reads_perturbation: bool = False
    _trace: Any = None  # the one in which the monitor was activated
    _epoch: object = field(default_factory=lambda: _epochs.current)

    def __hash__(self) -> int:
        return hash((self.bypass_rules, self.stops_intermediates, id(self._epoch)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CallMonitor) and (
            (self.bypass_rules, self.stops_intermediates) == (other.bypass_rules, other.stops_intermediates)
            and self._epoch is other._epoch
        )

    @contextmanager
    def active(self) -> Generator[None]:
        """Activates the monitor."""
        before, self._trace = self._trace, staging_trace()
        try:
            with CALL_MONITOR(self):
                yield
        finally:
            self._trace = before

    def note_trace(self) -> None:
        """Makes later monitors differ if JAX may cache the jaxpr that is being traced."""
        if staging_trace() is not self._trace:
            self.end_epoch()

    @staticmethod
    def end_epoch() -> None:
        """Makes later monitors differ from earlier ones."""
        _epochs.current = object()


class _Epochs(threading.local):
    """The current epoch of a thread: monitors of one epoch are equal if their options are."""

    def __init__(self) -> None:
        self.current = object()


_epochs = _Epochs()
