"""`residuals`: lists the arrays that reverse mode keeps for the backward pass."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfn._compat import make_jaxpr, memory_space, name_p
from jaxfn._inspection.reports import aligned, html_table
from jaxfn._jaxpr import SubJaxpr, is_any_of, is_variable, open_jaxpr, primitives, subjaxprs
from jaxfn._observe import OBSERVATION, Label, Observation, label_p
from jaxfn._primitives import attach_p, stop_p
from jaxfn._tree import is_array_leaf


class Residual(NamedTuple):
    """An array that reverse mode keeps for the backward pass, and the Function that saved it.

    Attributes:
      function: the name of the Function that saved it; "JAX" for residuals of JAX's own operations.
      name: the name, index or attribute of ctx under which it was saved: "x", `saved_tensors[0]`, `ctx.mask`. For a
        residual of JAX, the name of the argument that it is, if any.
      shape, dtype, nbytes: those of the whole array; in a scan, of the stacked array of all steps.
      kind: "input", "output" or "intermediate" of the Function (for a residual of JAX, of the whole function);
        "closed over" if `backward` captures it; "constant" for a constant of the jaxpr.
      argument: the argument of the function that it is, as `args[0]['w']`; "" if it is computed.
      enclosing: the control flow around the backward pass that reads it, the outermost first: "scan of 3",
        "checkpoint", "cond", ...
      is_packed: whether saved-tensor hooks have packed it.
      is_on_host: whether it is in host memory.
      is_duplicate: whether an earlier row has the same array, which is counted once.
    """

    function: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    kind: str
    argument: str = ""
    enclosing: tuple[str, ...] = ()
    is_packed: bool = False
    is_on_host: bool = False
    is_duplicate: bool = False

    @property
    def notes(self) -> str:
        """The text of the table's last column."""
        notes = [*self.enclosing]
        notes += [f"is {self.argument}"] * bool(self.argument and self.argument != self.name)
        notes += ["packed"] * self.is_packed + ["on the host"] * self.is_on_host
        return ", ".join(notes + ["counted above"] * self.is_duplicate)


_HEADER = ("Function", "saved as", "shape", "dtype", "bytes", "is", "")


class ResidualTable(Sequence[Residual]):
    """The residuals of a function: a sequence of `Residual` that prints as a table.

    Attributes:
      total_bytes: the number of bytes of all arrays, each counted once.
      bytes_by_function: the number of bytes by Function; "JAX" for residuals of JAX's own operations.
    """

    def __init__(self, rows: Sequence[Residual]) -> None:
        self._rows = list(rows)
        self.bytes_by_function: dict[str, int] = {}
        for row in self._rows:
            counted = 0 if row.is_duplicate else row.nbytes
            self.bytes_by_function[row.function] = self.bytes_by_function.get(row.function, 0) + counted
        self.total_bytes = sum(self.bytes_by_function.values())

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return str(self)

    def _cells(self) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
        """Returns the rows, and the rows of the totals."""
        rows = [
            (r.function, r.name, str(r.shape), r.dtype, f"{r.nbytes:,}" if not r.is_duplicate else "-", r.kind, r.notes)
            for r in self._rows
        ]
        sums = [*self.bytes_by_function.items(), ("all", self.total_bytes)]
        return rows, [(name, "", "", "", f"{nbytes:,}", "", "total") for name, nbytes in sums]

    def _repr_html_(self) -> str:
        """Returns the table for a notebook."""
        rows, totals = self._cells()
        return html_table(_HEADER, [*rows, *totals])

    def __str__(self) -> str:
        rows, totals = self._cells()
        head, *lines = aligned([_HEADER, *rows, *totals], to_the_right=[4])
        rule = "-" * max(map(len, lines))
        return "\n".join([head, rule, *lines[: len(rows)], rule, *lines[len(rows) :]])


def residuals(f: Callable[..., Any], *args: Any, argnums: int | Sequence[int] | None = None) -> ResidualTable:
    """Lists the arrays that reverse mode keeps for the backward pass of `f`, and which Function saved each of them.

    `f` is traced, not executed, with its checkpoint policies, hooks and transformations. The total equals the size of
    the pullback of `jax.vjp`. XLA may keep less, since it rematerializes and shares memory.

    Args:
      f: A function of pytrees of arrays. It may call jaxfn Functions.
      *args: Example arguments. `jax.ShapeDtypeStruct` is accepted in place of an array. Arguments that are not
        differentiated may be any Python value.
      argnums: The arguments to differentiate with respect to, as in `jax.grad`. Default: all. Arguments that are not
        differentiated need no residuals, so pass what the training step passes.

    Returns:
      A `ResidualTable` with one row per array and Function, in the order of the pullback's arrays, without arrays of
      size 0. `print` formats it; tests can assert its `total_bytes` and `bytes_by_function`.

    Raises:
      TypeError: An output, or an argument in `argnums`, is not an array.
      ValueError: `argnums` names an argument that was not passed.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxfn
      >>> @jaxfn.function
      ... def swish(ctx, x):
      ...     ctx.save_for_backward(x=x)
      ...     return x * jax.nn.sigmoid(x)
      >>> @swish.backward
      ... def _(ctx, grad_output):
      ...     x = ctx.saved_variables.x
      ...     s = jax.nn.sigmoid(x)
      ...     return grad_output * (s + x * s * (1 - s))
      >>> x = jax.ShapeDtypeStruct((1000,), jnp.float32)
      >>> ledger = jaxfn.residuals(lambda x: jnp.sin(swish(x)), x)
      >>> print(ledger)
      Function  saved as  shape    dtype    bytes  is
      ---------------------------------------------------------------------
      swish     x         (1000,)  float32  4,000  input         is args[0]
      JAX                 (1000,)  float32  4,000  intermediate
      ---------------------------------------------------------------------
      swish                                 4,000                total
      JAX                                   4,000                total
      all                                   8,000                total
      >>> assert ledger.total_bytes == 8000

    Torch counterpart: none; `torch.autograd.graph.saved_tensors_hooks` can be made to print what is saved.
    """
    chosen = range(len(args)) if argnums is None else np.atleast_1d(argnums).tolist()
    if any(not -len(args) <= i < len(args) for i in chosen):
        raise ValueError(f"residuals: argnums={argnums}, but {len(args)} arguments were passed.")
    return ResidualTable(list(_Passes(f, args, [i % len(args) for i in chosen]).rows()))


class _Passes:
    """The forward and the backward pass of a function as jaxprs; the backward pass has labels."""

    def __init__(self, f: Callable[..., Any], args: tuple[Any, ...], argnums: list[int]) -> None:
        trees: list[Any] = []
        paths, tree_of_args = jax.tree_util.tree_flatten_with_path(args)
        names = [f"args{jax.tree_util.keystr(path)}" for path, _ in paths]
        for name, (path, leaf) in zip(names, paths, strict=True):
            if path[0].idx in argnums and not (_is_array(leaf) or isinstance(leaf, (numbers.Number, np.generic))):
                raise TypeError(
                    f"residuals: {name} is of type {type(leaf).__name__}, expected an array. Pass the arguments to "
                    "differentiate with respect to: residuals(..., argnums=...)."
                )

        def forward(*arrays: Any) -> tuple[list[Any], list[Any]]:
            remaining = iter(arrays)
            leaves = [next(remaining) if _is_array(leaf) else leaf for _, leaf in paths]
            args = jax.tree_util.tree_unflatten(tree_of_args, leaves)

            def function_of_chosen(*values: Any) -> Any:
                chosen = dict(zip(argnums, values, strict=True))
                return f(*(chosen.get(i, x) for i, x in enumerate(args)))

            output, pullback = jax.vjp(function_of_chosen, *(args[i] for i in argnums))
            outputs, (kept, tree) = jax.tree_util.tree_leaves(output), jax.tree_util.tree_flatten(pullback)
            trees[:] = tree, jax.tree_util.tree_structure(output)
            return outputs, kept

        self._forward, _ = open_jaxpr(jax.make_jaxpr(forward)(*(leaf for _, leaf in paths if _is_array(leaf))))
        pullback_tree, output_tree = trees
        num_outputs = output_tree.num_leaves
        self._outputs = self._forward.outvars[:num_outputs]
        self._kept = self._forward.outvars[num_outputs:]
        names = [name for name, (_, leaf) in zip(names, paths, strict=True) if _is_array(leaf)]
        self._arguments = dict(zip(self._forward.invars, names, strict=True))

        def backward(kept: Sequence[Any], cotangents: Sequence[Any]) -> Any:
            filled = [
                ct if ct is not None else _no_cotangent(v.aval) for ct, v in zip(cotangents, outputs, strict=True)
            ]
            pullback: Any = jax.tree_util.tree_unflatten(pullback_tree, kept)
            return pullback(jax.tree_util.tree_unflatten(output_tree, filled))

        outputs = self._outputs
        cotangents = [_like(v.aval) if jnp.issubdtype(v.aval.dtype, jnp.inexact) else None for v in outputs]
        with OBSERVATION(Observation.RESIDUALS):
            self._backward, _ = open_jaxpr(make_jaxpr(backward, [_like(v.aval) for v in self._kept], cotangents))

    def rows(self) -> Iterator[Residual]:
        """Yields a row for each residual array and each Function that reads it."""
        seen: set[Any] = set()
        constants = set(self._forward.constvars)
        for kept, read in zip(self._kept, self._backward.invars, strict=False):
            nbytes = math.prod(kept.aval.shape) * kept.aval.dtype.itemsize
            if not nbytes:
                continue
            is_traced = is_variable(kept)
            argument = self._arguments.get(kept, "") if is_traced else ""
            row = Residual(
                "JAX",
                argument,
                kept.aval.shape,
                str(kept.aval.dtype),
                nbytes,
                "input" if argument else "intermediate",
                argument=argument,
                is_on_host=is_traced and memory_space(kept) == jax.memory.Space.Host,
            )
            if not is_traced or kept in constants:
                row = row._replace(kind="constant")
            elif any(kept is output for output in self._outputs):
                row = row._replace(kind="output")
            readers = list(_readers(self._backward, read, ()))
            by_functions = [reader for reader in readers if reader[0] is not None]
            for label, enclosing in by_functions or readers[:1] or [(None, ())]:
                is_duplicate = is_traced and kept in seen
                if is_traced:
                    seen.add(kept)
                reader_row = row._replace(enclosing=enclosing, is_duplicate=is_duplicate)
                if label is not None:
                    reader_row = reader_row._replace(
                        function=label.function, name=label.name, kind=label.source, is_packed=label.is_packed
                    )
                yield reader_row


def _is_array(leaf: Any) -> bool:
    """Whether a leaf is an argument of the jaxpr. Numbers, also of NumPy, become literals."""
    if isinstance(leaf, (np.ndarray, np.generic)):
        return isinstance(leaf, np.ndarray) and is_array_leaf(leaf)
    return is_array_leaf(leaf) or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))  # a `jax.ShapeDtypeStruct`


def _like(aval: Any) -> Any:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _no_cotangent(aval: Any) -> Any:
    return np.zeros(aval.shape, jax.float0)


# Primitives that only move or rename their operands.
_DATA_MOVEMENT = primitives("reshape squeeze broadcast_in_dim copy pvary optimization_barrier") | {
    name_p,
    attach_p,
    stop_p,
}


_Reader = tuple[Label | None, tuple[str, ...]]


def _readers(jaxpr: Any, variable: Any, enclosing: tuple[str, ...]) -> Iterator[_Reader]:
    """Yields what reads a variable: labels of Functions, or `None` for JAX itself, each with what encloses it."""
    for eqn in jaxpr.eqns:
        indices = [i for i, atom in enumerate(eqn.invars) if atom is variable]
        if not indices:
            continue
        if eqn.primitive is label_p:
            yield from ((eqn.params["labels"][i], enclosing) for i in indices)
            continue
        inner = subjaxprs(eqn)
        found: list[_Reader] = []
        unchanged: set[int | None] = set(indices) if is_any_of(eqn, _DATA_MOVEMENT) else set()
        for sub in inner:
            for invar, operand in zip(sub.jaxpr.invars, sub.operands, strict=True):
                if operand in indices:
                    found += _readers(sub.jaxpr, invar, (*enclosing, *_named(sub)))
                    unchanged |= {sub.results[i] for i in _unchanged_outputs(sub.jaxpr, invar)}
        for result in unchanged:
            if result is not None and result < len(eqn.outvars):
                found += _readers(jaxpr, eqn.outvars[result], enclosing)
        yield from found or ([] if inner else [(None, enclosing)])


def _unchanged_outputs(jaxpr: Any, variable: Any) -> Iterator[int]:
    """Yields the indices of the outputs of a jaxpr that are one of its variables."""
    same = {variable}
    for eqn in jaxpr.eqns:
        if is_any_of(eqn, _DATA_MOVEMENT):
            pairs = zip(eqn.invars, eqn.outvars, strict=False)
            same |= {result for atom, result in pairs if is_variable(atom) and atom in same}
    return (i for i, atom in enumerate(jaxpr.outvars) if is_variable(atom) and atom in same)


def _named(sub: SubJaxpr) -> tuple[str, ...]:
    if sub.kind == "scan":
        return (f"scan of {sub.length}",)
    return () if sub.kind in ("call", "jit") else (sub.kind,)
