"""The recipes of `examples/cookbook` as modules, and random numbers for them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np

FOLDER = Path(__file__).parents[2] / "examples" / "cookbook"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))


def load(name: str, folder: Path = FOLDER) -> ModuleType:
    """The recipe, or another example, as a module, new at each call; importing it does not run it."""
    spec = importlib.util.spec_from_file_location(f"{folder.name}_{name}", folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def normal64(*shape: int, seed: int = 0) -> np.ndarray:
    """Standard normal numbers."""
    return np.random.default_rng(seed).standard_normal(shape)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """Standard normal numbers in float32."""
    return normal64(*shape, seed=seed).astype(np.float32)
