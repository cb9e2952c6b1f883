"""The same Functions in several forms, one module per form, each with the same names.

`twice_swish`, which is differentiated twice, is in JAX's own forms only. "forward alone" has no derivative of its own,
so that only its eager call is measured.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import jax

HAND_WRITTEN = "hand-written"
FORWARD_ALONE = "forward alone"
TORCH = "torch"

# What each form needs besides JAX.
_FORMS = {
    "jaxfn": ("in_jaxfn", None),
    HAND_WRITTEN: ("hand_written", None),
    FORWARD_ALONE: ("forward_alone", None),
    "equinox": ("in_equinox", "equinox"),
    TORCH: ("in_torch", "torch"),
}


def installed_forms() -> dict[str, ModuleType]:
    """The forms that can run here; says which are skipped."""
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
