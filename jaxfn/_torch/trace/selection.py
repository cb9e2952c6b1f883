"""`x[mask]` with a traced mask: a tensor whose length depends on values, as long as it need not be known.

JAX's shapes are static, but most code that selects elements computes something of each and puts it back, as in `y[mask]
= torch.log(x[mask])`. So a selection keeps all of `x`, with ones where the mask is false: functions of each element
work on all of them, and assigning to the same mask puts back what was selected. The ones are there so that no function
is evaluated at a value that the mask keeps from it: the derivative there could be a NaN, which zero times a NaN would
spread.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from jaxfn._torch._compat import make_wrapper
from jaxfn._torch.graph.source_lines import ops_hint, running_line, source_line
from jaxfn._torch.values.errors import TranslationError


class Selection(torch.Tensor):
    """`x[mask]`.

    Attributes:
      full: a tensor of `x`'s shape, with ones where the mask is false.
      mask: the mask, whose dimensions are the first ones of `full`.
    """

    full: torch.Tensor
    mask: torch.Tensor

    @staticmethod
    def from_parts(full: torch.Tensor, mask: torch.Tensor) -> Selection:
        """The selection with these parts."""
        selection = make_wrapper(Selection, full.dtype)
        selection.full, selection.mask = full, mask
        return selection

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise_unsupported(str(func))


def raise_unsupported(what: str) -> NoReturn:
    """Raises for what cannot be done with a selection."""
    raise TranslationError(
        f"{what} of elements selected by a mask, x[mask]: how many there are depends on values, and JAX's shapes are "
        "static. What works are functions of each element, and assignment to the same mask. Write the rest with "
        f"torch.where, as in torch.where(mask, x, 0).sum(){ops_hint(running_line())}{source_line()}"
    )
