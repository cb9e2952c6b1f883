"""Attributes that have another value inside a block."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any


@contextlib.contextmanager
def setting(owner: Any, **values: Any) -> Generator[None]:
    """Inside, attributes of an object, perhaps a thread's own, have these values."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
