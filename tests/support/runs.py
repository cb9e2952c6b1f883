"""Counts how often code runs. A list would be Python state, which a converted Function is traced again for."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable

_NUMBERS = itertools.count()


class _ListHandler(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def noting_runs() -> tuple[Callable[[str], None], list[str]]:
    """Returns a function to call with a message, and the list of the messages."""
    logger, handler = logging.getLogger(f"{__name__}.{next(_NUMBERS)}"), _ListHandler()
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(handler)
    return logger.info, handler.messages
