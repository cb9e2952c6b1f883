"""Several implementations of a few Functions, one module for each, with equal names in all.

`twice_swish`, which is differentiated twice, is implemented on JAX only. "forward alone" has no custom derivative, so
that only its eager call is measured.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import jax

HAND_WRITTEN = "hand-written"
FORWARD_ALONE = "forward alone"
TORCH = "torch"

# The packages that each form needs in addition to JAX.
_FORMS = {
    "jaxfn": ("in_jaxfn", None),
    HAND_WRITTEN: ("hand_written", None),
    FORWARD_ALONE: ("forward_alone", None),
    "equinox": ("in_equinox", "equinox"),
    TORCH: ("in_torch", "torch"),
}


def installed_forms() -> dict[str, ModuleType]:
    """Returns the forms that can run here, and prints which are skipped."""
    forms: dict[str, ModuleType] = {}
    for name, (module, library) in _FORMS.items():
        if name == TORCH and jax.default_backend() != "cpu":
            print(f"{name}: skipped, it is measured on the CPU and JAX runs elsewhere")
            continue
        try:
            forms[name] = importlib.import_module(f"{__name__}.{module}")
        except ModuleNotFoundError as error:
            if library is None or error.name != library:
                raise
            print(f"{name}: skipped, {library} is not installed")
    return forms
