"""What a Function's derivative is made of, whatever mode it is for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxfn._protocol.outputs import Outputs
from jaxfn._protocol.saved_tensor_hooks import Hooks
from jaxfn._run.call import Call
from jaxfn._run.run import Run, Site


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
