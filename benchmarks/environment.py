"""The environment in which measurements are taken."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

import jaxfn


def environment() -> dict[str, Any]:
    """Returns the relevant versions, the machine, and its load."""
    return {
        "jaxfn": jaxfn.__version__,
        "jax": jax.__version__,
        "jaxlib": _version("jaxlib"),
        "python": platform.python_version(),
        "equinox": _version("equinox"),
        "flax": _version("flax"),
        "torch": _version("torch"),
        "processor": processor(),
        "machine": platform.machine(),
        "system": platform.system(),
        "cpus": os.cpu_count(),
        # On a busy machine waiting for a result costs tens of microseconds, which raises the ratios of eager calls.
        "load_before": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "backend": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
    }


def processor() -> str:
    """Returns the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
