"""The ctx that torch code sees while it is being traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class TorchContext(torch.autograd.function.FunctionCtx):
    """torch's ctx, for one trace of `forward`, `backward` or `jvp`.

    What the methods of the base class were given (`to_save`, `saved_for_forward`, `non_differentiable`,
    `dirty_tensors`, `materialize_grads`) they set as attributes of those names, as they do in torch.

    Args:
      needs_input_grad: whether each input is being differentiated.
      saved: what `saved_tensors` gives.
    """

    def __init__(
        self,
        needs_input_grad: Sequence[bool],
        saved: Sequence[torch.Tensor | None] = (),
        on_read: Callable[[], None] = lambda: None,
    ) -> None:
        self.jaxfn = _Own(tuple(needs_input_grad), tuple(saved), on_read)
        self.to_save: tuple[torch.Tensor | None, ...] = ()
        self.saved_for_forward: tuple[torch.Tensor | None, ...] | None = None
        self.dirty_tensors: tuple[torch.Tensor, ...] = ()
        self.non_differentiable: tuple[torch.Tensor, ...] = ()
        self.materialize_grads = True

    @property
    def needs_input_grad(self) -> tuple[bool, ...]:
        self.jaxfn.on_read()
        return self.jaxfn.needs_input_grad

    @property
    def saved_tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self.jaxfn.saved

    @property
    def saved_variables(self) -> tuple[torch.Tensor | None, ...]:
        """The old name of `saved_tensors`."""
        return self.jaxfn.saved

    @property
    def attributes(self) -> dict[str, Any]:
        """What the code itself assigned."""
        return {name: value for name, value in vars(self).items() if name not in _OURS}

    def after_forward(self, method: str) -> TorchContext:
        """The ctx as `backward` or `jvp` sees it, with all that `forward` left on it."""
        self.jaxfn.saved = self.to_save
        if method == "jvp" and self.saved_for_forward is not None:
            self.jaxfn.saved = self.saved_for_forward
        return self

    def mark_shared_storage(self, *pairs: Any) -> None:
        """Old code calls it; it has had no effect in torch for years."""


class _Own:
    def __init__(
        self, needs_input_grad: tuple[bool, ...], saved: tuple[torch.Tensor | None, ...], on_read: Callable[[], None]
    ) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved = saved
        self.on_read = on_read


_OURS = ("jaxfn", "to_save", "saved_for_forward", "dirty_tensors", "non_differentiable", "materialize_grads")
