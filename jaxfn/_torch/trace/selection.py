"""`x[mask]` with a traced mask: a tensor whose length depends on values.

JAX's shapes are static, but most code that selects elements computes something elementwise and writes it back, as in
`y[mask] = torch.log(x[mask])`. So a selection contains all elements of `x`, with ones where the mask is false.
Elementwise functions compute all of them, and an assignment to that mask writes the selected ones. The ones ensure
that no function is evaluated at a value outside the mask, where its derivative could be a NaN, which would spread:
zero times NaN is NaN.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.utils import _pytree as torch_tree

from jaxfn._torch._compat import make_wrapper
from jaxfn._torch.graph.recorder import Recorder
from jaxfn._torch.graph.source_lines import ops_hint, running_line, source_line
from jaxfn._torch.values.errors import SelectionError


class Selection(torch.Tensor):
    """`x[mask]` with a traced mask: a tensor of `x`'s shape, with ones where the mask is false, and the mask."""

    full: torch.Tensor
    mask: torch.Tensor
    recorder: Recorder

    @staticmethod
    def from_parts(full: torch.Tensor, mask: torch.Tensor, recorder: Recorder) -> Selection:
        """Returns the selection with these parts, in the trace of a recorder."""
        selection = make_wrapper(Selection, full.dtype)
        selection.full, selection.mask, selection.recorder = full, mask, recorder
        return selection

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        selections = (x for x in torch_tree.tree_leaves((args, kwargs)) if isinstance(x, Selection))
        raise_unsupported(next(selections).recorder, str(func))


def raise_unsupported(recorder: Recorder, what: str) -> NoReturn:
    """Raises for an operation on a selection that has no translation."""
    recorder.unanswered = SelectionError(
        f"{what} of elements selected by a mask, x[mask]: their number depends on values, and JAX's shapes are static. "
        "Only elementwise functions and assignment to that mask are supported. Use torch.where for the rest, as "
        f"in torch.where(mask, x, 0).sum(){ops_hint(running_line())}{source_line()}"
    )
    raise recorder.unanswered
