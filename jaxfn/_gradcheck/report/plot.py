"""Jacobians as heat maps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def draw(matrices: Mapping[str, np.ndarray[Any, Any]], of_input: str, of_output: str) -> Any:
    """Returns a figure of the analytic Jacobian, the reference, and their difference.

    Raises:
      ValueError: `matrices` is empty.
    """
    if not matrices:
        raise ValueError("this Jacobian is too large to be drawn: only its worst entries were stored")
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    analytic = matrices["analytic"]
    name = "numeric" if "numeric" in matrices else "autodiff"
    reference = matrices[name]
    figure = Figure(figsize=(12, 4), layout="constrained")
    panels: Any = figure.subplots(1, 3)
    limit = _limit(analytic, reference)
    pictures = (("analytic", analytic, limit), (name, reference, limit), ("error", *_error(analytic, reference)))
    for panel, (title, matrix, bound) in zip(panels, pictures, strict=True):
        shown = matrix.real if np.iscomplexobj(matrix) else matrix
        image = panel.imshow(
            shown, cmap=colormaps["RdBu_r"], vmin=-bound, vmax=bound, aspect="auto", interpolation="nearest"
        )
        panel.set(title=title, xlabel=of_input, ylabel=of_output)
        figure.colorbar(image, ax=panel)
    return figure


def _error(analytic: Any, reference: Any) -> tuple[Any, float]:
    difference = analytic - reference
    return difference, _limit(difference)


def _limit(*matrices: Any) -> float:
    """Returns the end of the colour scale, which is symmetric about zero."""
    finite = [abs(m[np.isfinite(m)]).max(initial=0.0) for m in matrices]
    return float(max(finite)) or 1.0
