"""Counts how often code runs, and how much."""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable

_NUMBERS = itertools.count()


class _ListHandler(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def noting_runs() -> tuple[Callable[[str], None], list[str]]:
    """Returns a function to call with a message, and the list of the messages.

    A list that the code appends to would be Python state, which a converted Function is traced again for.
    """
    logger, handler = logging.getLogger(f"{__name__}.{next(_NUMBERS)}"), _ListHandler()
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(handler)
    return logger.info, handler.messages


def number_of_calls(function: Callable[[], object]) -> int:
    """Returns how many Python functions a call of `function` calls: what it costs, without a clock."""
    count = 0

    def profile(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count
