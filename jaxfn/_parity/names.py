"""Matches of the parameters of a port and of the torch module, by their numbers, gradients and names.

# Note: the order of the search

1. `names` says it.
2. One leaf has the numbers, in some layout. Random weights determine it, and their layout; of several layouts, that in
   which the gradient is torch's is chosen.
3. Several leaves do: all biases may be zeros. The one whose gradient is torch's is chosen, which cannot hide a
   difference; else the one with the most similar path.
4. None does: the leaf with the most similar path, whose numbers then count as different.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfn._parity.inputs import Array
from jaxfn._parity.ported_module import ParameterTree
from jaxfn._parity.values import layouts
from jaxfn._tree import is_inexact

Names = Mapping[str, "str | Callable[[Any], Any]"]
_SYNONYMS = {
    **dict.fromkeys(("kernel", "scale", "embedding", "gamma", "w"), "weight"),
    **dict.fromkeys(("beta", "b"), "bias"),
    "mean": "running_mean",
    "var": "running_var",
}
_RTOL_OF_NUMBERS = 1e-6


@dataclass(frozen=True)
class Match:
    """The counterpart of a torch tensor in a pytree of the port.

    Attributes:
      path: the path of a leaf, or the name of the user's function.
      leaves: the indices of the leaves.
      select: returns it in torch's layout, from the arrays of such a pytree.
      is_equal: whether it has the numbers of torch.
    """

    path: str
    leaves: tuple[int, ...]
    select: Callable[[Sequence[Any]], Array]
    is_equal: bool


class Matcher:
    """Finds the counterparts of torch's tensors in a pytree.

    Args:
      tree: the pytree.
      names: the user's names, by those of torch tensors, or of layers.
    """

    def __init__(self, tree: ParameterTree, names: Names) -> None:
        self._tree = tree
        self._names = names
        self._used: set[int] = set()
        self._owners: dict[str, list[str]] = {}  # by the name of a torch layer, the paths of its leaves without keys

    def match(
        self,
        tensors: Mapping[str, Array],
        evidence: Callable[[str, Callable[[Sequence[Any]], Array]], bool],
        strict: bool = True,
    ) -> dict[str, Match]:
        """Returns the counterparts that were found, by the names in torch.

        Args:
          tensors: the tensors.
          evidence: whether a selector chooses what behaves as the tensor does, in gradients or updates.
          strict: whether a leaf with other numbers can be a counterpart.
        """
        found: dict[str, Match] = {}
        rest: list[str] = []
        for name, tensor in tensors.items():
            named = self._names.get(name)
            if callable(named):
                found[name] = self._function(named, tensor)
                continue
            candidates = self._equal(name, tensor)
            if len({leaf for leaf, _ in candidates}) == 1 and not _is_constant(tensor):
                # Several layouts may have the numbers, as of a symmetric matrix.
                alike = (c for c in candidates if evidence(name, self._selector(*c, tensor.shape)))
                found[name] = self._use(name, *next(alike, candidates[0]), tensor)
            else:
                rest.append(name)
        for name in rest:
            tensor = tensors[name]
            candidates = [c for c in self._equal(name, tensor) if c[0] not in self._used]
            alike = [c for c in candidates if evidence(name, self._selector(*c, tensor.shape))]
            chosen = self._most_similar(name, alike or candidates)
            if chosen is None and not candidates and strict:
                chosen = self._most_similar(name, self._of_size(name, tensor))
            if chosen is not None:
                found[name] = self._use(name, *chosen, tensor)
        return found

    def unused(self) -> list[int]:
        """Returns the leaves that are not a counterpart."""
        return [i for i in range(len(self._tree.arrays)) if i not in self._used]

    def _paths(self, name: str) -> list[int]:
        """Returns the leaves that a tensor's name permits."""
        owner = name
        while owner:
            if isinstance(path := self._names.get(owner), str):
                wanted = _tokens(path, {})
                found = [i for i, p in enumerate(self._tree.paths) if _tokens(p, {})[: len(wanted)] == wanted]
                return found or [i for i, p in enumerate(self._tree.paths) if _contains(_tokens(p, {}), wanted)]
            owner = owner.rpartition(".")[0]
        return list(range(len(self._tree.paths)))

    def _equal(self, name: str, tensor: Array) -> list[tuple[int, int]]:
        """Returns the leaves with a tensor's numbers, each with the number of a layout."""
        return [
            (leaf, layout)
            for leaf in self._paths(name)
            if (array := self._tree.arrays[leaf]).size == tensor.size
            for layout, x in enumerate(layouts(array, tensor.shape))
            if _has_numbers(x, tensor)
        ]

    def _of_size(self, name: str, tensor: Array) -> list[tuple[int, int]]:
        free = (leaf for leaf in self._paths(name) if leaf not in self._used)
        return [(leaf, 0) for leaf in free if self._tree.arrays[leaf].size == tensor.size]

    def _most_similar(self, name: str, candidates: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
        scores = [self._similarity(name, self._tree.paths[leaf]) for leaf, _ in candidates]
        best = max(scores, default=0.0)
        leaves = {leaf for (leaf, _), score in zip(candidates, scores, strict=True) if score == best}
        if len(leaves) != 1 or (best <= 0 and len({leaf for leaf, _ in candidates}) > 1):
            return None
        return candidates[scores.index(best)]

    def _similarity(self, name: str, path: str) -> float:
        ours, theirs = _tokens(path), _tokens(name)
        common = sum(min(ours.count(token), theirs.count(token)) for token in set(ours))
        is_sibling = _parent(path) in self._owners.get(name.rpartition(".")[0], [])
        return common + 10 * is_sibling + (ours[-1:] == theirs[-1:]) - 0.01 * len(ours)

    def _use(self, name: str, leaf: int, layout: int, tensor: Array) -> Match:
        path = self._tree.paths[leaf]
        self._used.add(leaf)
        self._owners.setdefault(name.rpartition(".")[0], []).append(_parent(path))
        return self._match(path, (leaf,), self._selector(leaf, layout, tensor.shape), tensor)

    def _match(
        self, path: str, leaves: tuple[int, ...], select: Callable[[Sequence[Any]], Array], tensor: Array
    ) -> Match:
        array = select(self._tree.arrays)
        if array.shape != tensor.shape:
            raise ValueError(f"paritycheck: {path} returns shape {array.shape}, expected torch's {tensor.shape}")
        return Match(path, leaves, select, _has_numbers(array, tensor))

    def _selector(self, leaf: int, layout: int, shape: tuple[int, ...]) -> Callable[[Sequence[Any]], Array]:
        return lambda arrays: next(islice(layouts(np.asarray(arrays[leaf]), shape), layout, None))

    def _function(self, function: Callable[[Any], Any], tensor: Array) -> Match:
        def select(arrays: Sequence[Any]) -> Array:
            return np.asarray(function(self._tree.unflatten(list(map(jnp.asarray, arrays)))))

        inexact = [i for i, x in enumerate(self._tree.arrays) if is_inexact(x.dtype)]
        arrays: list[Any] = list(map(jnp.asarray, self._tree.arrays))

        def chosen(values: Sequence[Any]) -> Any:
            merged = list(arrays)
            for i, value in zip(inexact, values, strict=True):
                merged[i] = value
            return function(self._tree.unflatten(merged))

        result, pullback = jax.vjp(chosen, [arrays[i] for i in inexact])
        (touched,) = pullback(jnp.ones_like(result))
        leaves = tuple(i for i, g in zip(inexact, touched, strict=True) if bool((g != 0).any()))
        self._used.update(leaves)
        return self._match(getattr(function, "__name__", "function"), leaves, select, tensor)


def _has_numbers(array: Array, tensor: Array) -> bool:
    rtol = _RTOL_OF_NUMBERS * is_inexact(tensor.dtype)
    return bool(
        (abs(array.astype(np.result_type(array, np.float64)) - tensor) <= rtol * abs(tensor).max(initial=0)).all()
    )


def _is_constant(array: Array) -> bool:
    return not array.size or bool((array == array.flat[0]).all())


def _tokens(path: str, synonyms: Mapping[str, str] = _SYNONYMS) -> list[str]:
    found = [
        part for name in re.findall(r"\w+", path) for part in ([name] if name in _WHOLE_TOKENS else name.split("_"))
    ]
    return [synonyms.get(token, token) for token in found if token not in ("", "value")]


_WHOLE_TOKENS = {"running_mean", "running_var", "num_batches_tracked"}


def _contains(tokens: Sequence[str], wanted: Sequence[str]) -> bool:
    return any(tokens[i : i + len(wanted)] == wanted for i in range(len(tokens) - len(wanted) + 1))


def _parent(path: str) -> str:
    return re.sub(r"(\.value|\['value'\]|\.raw_value)$", "", path).rpartition("[" if path.endswith("]") else ".")[0]
