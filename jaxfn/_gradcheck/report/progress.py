"""A progress bar for long checks, of `gradcheck` and `kernelcheck`."""

from __future__ import annotations

import time
from typing import Any

_SECONDS_BEFORE_SHOWN = 2.0


class Progress:
    """A counter of the steps of a check, shown by tqdm after two seconds if tqdm is installed."""

    def __init__(self, title: str, unit: str) -> None:
        self._title = title
        self._unit = unit
        self._start = time.monotonic()
        self._expected = self._done = 0
        self._bar: Any = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.close()

    def expect(self, count: int) -> None:
        """Adds to the number of steps to come."""
        self._expected += count

    def advance(self, count: int) -> None:
        """Adds to the number of steps that are done."""
        self._done += count
        if self._bar is None and time.monotonic() - self._start > _SECONDS_BEFORE_SHOWN:
            self._bar = _new_bar(self._title, self._unit, self._expected, self._done)
        if self._bar is not None:
            self._bar.total = self._expected
            self._bar.update(self._done - self._bar.n)


def _new_bar(title: str, unit: str, total: int, done: int) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    # `disable=None` shows the bar on a terminal only.
    return tqdm(desc=title, total=total, initial=done, unit=f" {unit}", leave=False, disable=None)
