"""A line on the terminal for checks that take long."""

from __future__ import annotations

import sys
import time

_PATIENCE = 3.0  # seconds before anything is shown
_INTERVAL = 0.2
_WIDTH = 30


class Progress:
    """Counts what is to be done and what is; shows it on a terminal once that takes more than a few seconds."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._begin = self._shown = time.monotonic()
        self._expected = self._done = 0
        self._has_line = False
        self._is_terminal = sys.stderr is not None and sys.stderr.isatty()

    def expect(self, count: int) -> None:
        """So many more steps are to come."""
        self._expected += count

    def advance(self, count: int) -> None:
        """So many steps are done."""
        self._done += count
        now = time.monotonic()
        if self._is_terminal and now - self._begin > _PATIENCE and now - self._shown > _INTERVAL:
            self._shown = now
            self._has_line = True
            sys.stderr.write("\r" + self.line())
            sys.stderr.flush()

    def line(self) -> str:
        """The progress in words and as a bar."""
        filled = _WIDTH * self._done // max(self._expected, 1)
        bar = "#" * filled + "." * (_WIDTH - filled)
        return f"{self._title} [{bar}] {self._done:,} of {self._expected:,} directions"

    def close(self) -> None:
        """Clears the line."""
        if self._has_line:
            sys.stderr.write("\r" + " " * len(self.line()) + "\r")
            sys.stderr.flush()
