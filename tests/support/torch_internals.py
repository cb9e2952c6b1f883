"""torch's own test modules, for the samples and the databases in them."""

from __future__ import annotations

import importlib
import sys
import types
import unittest
import warnings
from types import ModuleType
from typing import Any


def torch_internal(name: str) -> ModuleType:
    """The module `torch.testing._internal.<name>`; it wants a package for torch's own test cases, not needed here."""
    try:
        importlib.import_module("expecttest")
    except ImportError:
        stand_in: Any = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stand_in
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"torch.testing._internal.{name}")
