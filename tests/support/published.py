"""Packages that other people published, whose whole models are compared with torch."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from typing import Any

import pytest

# Unpacked together in the folder `models` of the one that `JAXFN_WILD_SRC` names, without what they depend on: that
# would be another build of torch. Those from einops on are what CompressAI imports.
PACKAGES = (
    *("timm==1.0.31", "torchvision==0.28.0", "compressai==1.2.8", "pytorch_msssim==1.0.0", "einops==0.8.2", "pandas"),
    *("python-dateutil", "pytz", "torch_geometric==2.8.1", "xxhash", "requests", "urllib3", "certifi"),
    "charset_normalizer",
)
FOLDER = os.path.join(os.environ.get("JAXFN_WILD_SRC", ""), "models")


def package(name: str) -> Any:
    """A package, or one of its modules; where it cannot be imported, the test is skipped."""
    if os.path.isdir(FOLDER) and FOLDER not in sys.path:
        sys.path.append(FOLDER)  # what the environment has comes first
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _import_torchvision()
        try:
            return importlib.import_module(name)
        except ImportError as error:
            pytest.skip(f"{name}: {error}")


def _import_torchvision() -> None:
    """Its wheel is built for another build of torch than the one for CPUs, and says so: its kernels are not there."""
    import torch

    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
    except ImportError:
        pass
