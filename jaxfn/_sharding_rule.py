"""`ShardingRule`: which dimensions of a Function's inputs and outputs are one, and may be split over mesh axes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress, zip_longest
from typing import Any, NamedTuple, TypeAlias

from jaxfn._signature import InputSpec

Factors: TypeAlias = tuple[str, ...]
"""A factor for each dimension of an array; "" for a dimension that is never split."""

_NAME = re.compile(r"[A-Za-z]\w*")


@dataclass(frozen=True)
class ShardingRule:
    """The partitioning of a Function over devices, in the words of JAX's `custom_partitioning`.

    Args:
      rule: A factor, that is a name, for each dimension of each array input and output: `"batch d, d hidden -> batch
        hidden"`. An array without dimensions has none; `...` is any number of leading dimensions. An input that
        is static in a call may have a group of factors or none.
      reduction_factors: Where one of these is split, the outputs without it are added up over the parts.
      need_replication_factors: These are never split.
      manual_factors: Where one of these is split, the code communicates itself over `ctx.mesh_axes(factor)`, so that
        outputs without it are equal on all parts.

    Each factor that an output lacks is one of these.

    Raises:
      ValueError: The rule cannot be parsed, or leaves a factor unsaid.

    Examples:
      >>> import jaxfn
      >>> jaxfn.ShardingRule("batch d, d hidden -> batch hidden", reduction_factors=("d",)).inputs
      (('batch', 'd'), ('d', 'hidden'))

    Torch counterpart: none.
    """

    rule: str
    reduction_factors: Sequence[str] = ()
    need_replication_factors: Sequence[str] = ()
    manual_factors: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.rule.count("->") != 1:
            raise self._error("expected one '->', between inputs and outputs")
        kinds = [*self.reduction_factors, *self.need_replication_factors, *self.manual_factors]
        for factors in (*self.inputs, *self.outputs):
            names = factors[factors[:1] == ("...",) :]
            if not all(map(_NAME.fullmatch, names)) or len(set(names)) < len(names):
                raise self._error(f"{' '.join(factors)!r} is not one different name for each dimension, '...' first")
        for factor in kinds:
            if factor not in chain(*self.inputs, *self.outputs) or kinds.count(factor) > 1:
                raise self._error(f"factor {factor!r} has to be in the rule, and in one kind of factors alone")
        for index, factors in enumerate(self.outputs):
            for factor in dict.fromkeys(chain(*self.inputs)):
                if factor not in (*factors, *kinds):
                    raise self._error(
                        f"output {index} lacks factor {factor!r}, and nothing says what happens where it is split. "
                        f"Write ShardingRule(rule, reduction_factors=({factor!r},)) if outputs of parts are to be "
                        "added up, need_replication_factors=... if it may not be split, or manual_factors=... if the "
                        "Function communicates itself"
                    )

    @staticmethod
    def of(name: str, rule: Any) -> ShardingRule | None:
        """Returns the rule of a Function, which may be its text."""
        if not isinstance(rule, (str, ShardingRule, type(None))):
            raise TypeError(f"{name}: sharding_rule has to be a string or a jaxfn.ShardingRule, got {rule!r}")
        try:
            return ShardingRule(rule) if isinstance(rule, str) else rule
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    @property
    def inputs(self) -> tuple[Factors, ...]:
        """The factors of each input."""
        return _parse(self.rule.partition("->")[0])

    @property
    def outputs(self) -> tuple[Factors, ...]:
        """The factors of each output."""
        return _parse(self.rule.partition("->")[2])

    def axes_of_factors(self, axes: Mapping[str, tuple[str, ...]] | None) -> dict[str, tuple[str, ...]]:
        """Returns the mesh axes over which each factor is split, from those of factors that are split."""
        return {f: (axes or {}).get(f, ()) for f in chain(*self.inputs, *self.outputs) if f != "..."}

    def _error(self, problem: str) -> ValueError:
        return ValueError(f"sharding_rule {self.rule!r}: {problem}.")

    def bind(self, name: str, inputs: InputSpec, avals: Sequence[Any], output_avals: Sequence[Any]) -> BoundRule:
        """Returns the rule for one call, with `...` replaced by factors; `avals` are the types of array leaves."""
        groups = self.inputs
        counts = [tree.num_arrays for tree in inputs.trees]
        are_arrays = [count > 0 for count in counts for _ in range(max(count, 1))]
        if len(groups) == len(are_arrays):  # static inputs have groups too
            groups = tuple(compress(groups, are_arrays))
        labels = [inputs.names.describe(i) for i in inputs.per_leaf()]
        labels += [f"output {i}" for i in range(len(output_avals))]
        for what, side, types in (("inputs", groups, avals), ("outputs", self.outputs, output_avals)):
            if len(side) != len(types):
                raise ValueError(
                    f"{name}.sharding_rule {self.rule!r} has factors for {len(side)} {what}, and the call has "
                    f"{len(types)} arrays there. Write the factors of each array, separated by commas."
                )
        sizes: dict[str, tuple[int, str]] = {}
        expanded: list[Factors] = []
        for factors, aval, label in zip((*groups, *self.outputs), (*avals, *output_avals), labels, strict=True):
            leading = len(aval.shape) - len(factors) + 1 if factors[:1] == ("...",) else 0
            named = (*(f"...{i}" for i in range(leading)), *factors[factors[:1] == ("...",) :])
            if len(named) != len(aval.shape):
                raise ValueError(
                    f"{name}.sharding_rule {self.rule!r} has the factors {' '.join(factors)!r} for {label}, which has "
                    f"shape {tuple(aval.shape)}. Write one factor for each dimension."
                )
            found = [*zip(named, aval.shape, strict=True), *[("...", leading)] * (factors[:1] == ("...",))]
            for factor, size in found:
                before, where = sizes.setdefault(factor, (size, label))
                if size != before:
                    raise ValueError(
                        f"{name}.sharding_rule: factor {factor!r} has size {before} in {where} and size {size} in "
                        f"{label}. Give dimensions of different sizes different factors, and write those that may not "
                        "be split into need_replication_factors."
                    )
            expanded.append(named)
        dimensions = {"...": [f"...{i}" for i in range(sizes.pop("...", (0, ""))[0])]}
        kinds = self.reduction_factors, self.need_replication_factors, self.manual_factors
        reduced, whole, manual = (set(chain(*(dimensions.get(f, [f]) for f in factors))) for factors in kinds)
        whole |= set(chain(*expanded)).difference(*expanded[: len(avals)])  # no input says how these are split
        split = [tuple("" if f in whole else f for f in factors) for factors in expanded]
        known = {f: size for f, (size, _) in sizes.items()}
        return BoundRule(name, split[: len(avals)], split[len(avals) :], [], labels, reduced, manual, known)


class BoundRule(NamedTuple):
    """A sharding rule for the arrays of one call.

    Attributes:
      name: The Function.
      inputs, outputs, intermediates: The factors of each array leaf, and of what is saved and neither of these.
      labels: What errors call the inputs and outputs.
      reduced, manual: The factors that are reduced, and that the code communicates over.
      sizes: The size of each factor.
    """

    name: str
    inputs: list[Factors]
    outputs: list[Factors]
    intermediates: list[Factors]
    labels: list[str]
    reduced: set[str]
    manual: set[str]
    sizes: dict[str, int]

    def factors(self) -> list[str]:
        """Returns the factors that may be split, in the order of the rule."""
        return list(filter(None, dict.fromkeys(chain(*self.inputs))))

    def of(self, kind: str, index: int) -> Factors:
        """Returns the factors of an "input", "output" or "intermediate"."""
        return {"input": self.inputs, "output": self.outputs, "intermediate": self.intermediates}[kind][index]

    def declared(self, text: str, shape: Sequence[int], name: str) -> Factors:
        """Returns the factors that `ctx.save_for_backward(..., factors=...)` says of an array, `""` for `_`."""
        factors = text.split()
        if [size if f == "_" else self.sizes.get(f) for f, size in zip_longest(factors, shape)] != list(shape):
            known = ", ".join(f"{f} of size {n}" for f, n in self.sizes.items())
            raise ValueError(
                f"{self.name}: ctx.save_for_backward has factors={text!r} for {name}, of shape "
                f"{tuple(shape)}. Write one for each dimension, or _ for none; the rule has {known}."
            )
        return tuple(f if f in self.factors() else "" for f in factors)


def _parse(side: str) -> tuple[Factors, ...]:
    return tuple(tuple(group.replace("...", " ... ").split()) for group in side.split(","))
