"""What a Function's derivative is made of, whatever mode it is for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jaxfn._compat import Batch, enclosing_batches
from jaxfn._protocol.hooks import Hooks
from jaxfn._protocol.outputs import OutputLayout, Outputs
from jaxfn._run.call import Call
from jaxfn._run.run import Run


@jax.tree_util.register_static
class Site:
    """One place in a program where a Function is called, and what is the same for all that JAX makes of it there.

    # Note: what JAX keeps of a call, and what has to travel with it

    JAX may trace a call once and differentiate it later, in another order, or more than once:

        f = jax.jit(F.apply)      the primal runs: the Site is made here, with the hooks that are in force
        jax.grad(f)               fwd runs, when those hooks may be gone: it asks the Site for them
        a scan, twice             fwd runs for each pattern of perturbed inputs, bwd for each; the residuals of all
                                  patterns must be one pytree, as JAX keeps only the last one's structure

    A closure would not do: JAX keeps the trace, and calls no function again to make one. So a Site is the static part
    of a pytree node without leaves. It is the first operand, the primal's and fwd's alike, and it is in the residuals.

    A pytree node without leaves. Sites are equal where what a call there means is: JAX's coming custom_vjp keeps its
    traces by that, and would trace every call anew.

    Attributes:
      hooks: the saved-tensor hooks in force at the call. (JAX may run what differentiates it later, out of the block.)
      num_around: how many uses of `jax.vmap` map a derivative that is being taken of the call. Others map the call
        itself, so that its derivative is of the mapped call.
      outputs: the structure of what the primal returned, where it ran.
      unbatched: where the call was mapped as part of a program, the outputs that did not depend on which batch.
      runs: the runs of `forward` there; see `reverse`.
    """

    def __init__(self, hooks: Hooks | None) -> None:
        self.hooks = hooks
        self.num_around = enclosing_batches().num_around
        self.unbatched: set[tuple[Batch, int]] = set()
        self.outputs: OutputLayout | None = None
        self.runs: list[Run] = []

    def check_outputs(self, run: Run) -> None:
        """Raises where forward returned another structure than the primal, which JAX cannot put together."""
        if self.outputs is not None and self.outputs != run.outputs:
            raise RuntimeError(
                f"{run.call.name}.forward returned {run.outputs!r} when ctx.needs_input_grad was "
                f"{run.needs_input_grad}, and {self.outputs!r} when nothing was differentiated. What forward returns, "
                "and marks as non-differentiable, must not depend on ctx.needs_input_grad."
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Site) and self.hooks is other.hooks and self.num_around == other.num_around

    def __hash__(self) -> int:
        return hash(id(self.hooks))


class Linearized(NamedTuple):
    """A function's value, and what its derivative there needs."""

    outputs: Outputs
    run: Run
    residuals: list[Any]


class Rule(ABC):
    """A function of arrays, its operands, whose derivative is that of a run of `forward`, the user's."""

    call: Call

    @property
    def operand_names(self) -> tuple[str, ...] | None:
        """What the operands are called in JAX's messages, where they have names."""
        return None

    @abstractmethod
    def primal(self, site: Site, operands: Sequence[Any]) -> Outputs:
        """The function itself."""

    @abstractmethod
    def attached_primal(self, site: Site, operands: Sequence[Any]) -> Outputs:
        """The function itself, with its derivative wherever JAX differentiates its operations all the same."""

    @abstractmethod
    def linearized(self, operands: Sequence[Any], perturbed: tuple[bool, ...], hooks: Hooks | None) -> Linearized:
        """The function's value where these operands are being differentiated, and what its derivative needs."""

    @abstractmethod
    def inputs_among(self, operands: Sequence[Any]) -> Sequence[Any]:
        """Those operands that are array leaves of the Function's inputs; or what belongs to them, as tangents do."""

    @abstractmethod
    def operands_with(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """The inverse: what belongs to inputs in the operands' places, with `None` for operands that are no inputs."""


Differentiable = Callable[..., Outputs]
"""A function of a `Site` and a rule's operands."""
