"""`residuals`: lists the arrays that reverse mode saves for the backward pass."""

from __future__ import annotations

import inspect
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import AbstractValue

from jaxfn._check.arguments import as_function, noting_packed_arguments
from jaxfn._compat import eqn_source_line, make_jaxpr, name_p
from jaxfn._jaxpr import SubJaxpr, is_any_of, is_variable, open_jaxpr, primitives, subjaxprs
from jaxfn._observe import OBSERVATION, Label, Observation, label_p
from jaxfn._partition import RECORD, PartitionRecord
from jaxfn._primitives import tie_p
from jaxfn._reports import Report, aligned, html_table, public
from jaxfn._torch.values.arrays import with_arrays
from jaxfn._tree import is_array_leaf, is_inexact, replace_at


@public
class Residual(NamedTuple):
    """An array that reverse mode saves for the backward pass, and the Function that saved it.

    Attributes:
      function: the name of the Function that saved it; "JAX" for residuals of JAX's own operations.
      name: the name, index or attribute of ctx under which it was saved: "x", `saved_tensors[0]`, `ctx.mask`. For a
        residual of JAX, the argument that it is, the name from `checkpoint_name`, or the operation that computes it.
      shape, dtype, nbytes: those of the whole array; in a scan, of the stacked array of all steps.
      role: "input", "output" or "intermediate" of the Function (for a residual of JAX, of the whole function);
        "closed over" if `backward` captures it; "constant" for a constant of the jaxpr.
      argument: the argument of the function that it is, as `args[0]['w']`; "" if it is computed.
      enclosing: the control flow around the backward pass that reads it, the outermost first: "scan of 3",
        "checkpoint", "cond", ...
      is_packed: whether saved-tensor hooks have packed it.
      is_on_host: whether it is in host memory.
      is_duplicate: whether an earlier row has this array, which is counted once.
      location: where it is computed, as "file:line:column (function)"; "" for an argument or a constant.
      factors: for each dimension, the factor of the Function's sharding rule by which it is split, "" for none; `None`
        if there is no rule.
    """

    function: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    role: str
    argument: str = ""
    enclosing: tuple[str, ...] = ()
    is_packed: bool = False
    is_on_host: bool = False
    is_duplicate: bool = False
    location: str = ""
    factors: tuple[str, ...] | None = None

    @property
    def notes(self) -> str:
        """The text of the table's last column."""
        notes = [*self.enclosing]
        notes += [f"is {self.argument}"] * bool(self.argument and self.argument != self.name)
        notes += [] if self.factors is None else [f"split by {' '.join(f or '_' for f in self.factors) or 'nothing'}"]
        notes += ["packed"] * self.is_packed + ["on the host"] * self.is_on_host
        notes += ["counted above"] * self.is_duplicate + [Path(self.location).name] * bool(self.location)
        return ", ".join(notes)


_HEADER = ("Function", "saved as", "shape", "dtype", "bytes", "is", "")


_Row = tuple[str, ...]


class _Printed(Report):
    """A table with totals that prints as text, and as HTML in notebooks."""

    _columns_of_numbers = slice(4, None)

    def _table(self) -> tuple[_Row, list[_Row], list[_Row]]:
        """Returns the header, the rows, and the rows of the totals."""
        raise NotImplementedError

    def __str__(self) -> str:
        header, rows, totals = self._table()
        to_the_right = range(len(header))[self._columns_of_numbers]
        head, *lines = aligned([header, *rows, *totals], to_the_right)
        rule = "-" * max(map(len, lines))
        return "\n".join([head, rule, *lines[: len(rows)], rule, *lines[len(rows) :]])

    def _repr_html_(self) -> str:
        header, rows, totals = self._table()
        return html_table(header, [*rows, *totals])


@public
class ResidualTable(_Printed, Sequence[Residual]):
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

    _columns_of_numbers = slice(4, 5)

    def _table(self) -> tuple[_Row, list[_Row], list[_Row]]:
        rows = [
            (r.function, r.name, str(r.shape), r.dtype, f"{r.nbytes:,}" if not r.is_duplicate else "-", r.role, r.notes)
            for r in self._rows
        ]
        sums = [*self.bytes_by_function.items(), ("all", self.total_bytes)]
        return _HEADER, rows, [(name, "", "", "", f"{nbytes:,}", "", "total") for name, nbytes in sums]

    def to_dict(self) -> dict[str, Any]:
        """Returns the table as plain Python values."""
        rows = [row._asdict() for row in self._rows]
        return {"rows": rows, "bytes_by_function": self.bytes_by_function, "total_bytes": self.total_bytes}


@public
class ResidualComparison(_Printed, Mapping[str, ResidualTable]):
    """Residuals under several checkpoint policies, or of several functions: a mapping that prints side by side.

    The text has a column of bytes for each `ResidualTable`, and a row for each Function, name, shape and dtype:
    "3 x 4,000" are three arrays, "-" is an array that another row counts.

    Args:
      tables: the tables by name.

    Attributes:
      total_bytes: the number of bytes of all arrays, by the name of the table.
    """

    def __init__(self, tables: Mapping[str, ResidualTable]) -> None:
        self._tables = dict(tables)
        self.total_bytes = {name: table.total_bytes for name, table in self._tables.items()}

    def __getitem__(self, name: str) -> ResidualTable:
        return self._tables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    def _table(self) -> tuple[_Row, list[_Row], list[_Row]]:
        counts = [Counter[Any]() for _ in self]
        sources: dict[Any, int] = {}  # their sizes, in order
        for count, table in zip(counts, self.values(), strict=True):
            for r in table:
                source = r.function, r.name, str(r.shape), r.dtype
                sources[source] = r.nbytes
                count[source] += not r.is_duplicate

        def cell(count: Counter[Any], source: Any) -> str:
            number, nbytes = count[source], f"{sources[source]:,}"
            return ("-" if source in count else "") if not number else nbytes if number == 1 else f"{number} x {nbytes}"

        rows = [(*source, *(cell(count, source) for count in counts)) for source in sources]
        functions = dict.fromkeys(name for table in self.values() for name in table.bytes_by_function)
        sums = {name: [table.bytes_by_function.get(name, 0) for table in self.values()] for name in functions}
        sums["all"] = list(self.total_bytes.values())
        if any(r.is_on_host for table in self.values() for r in table):
            on_host = [[r.nbytes for r in table if r.is_on_host and not r.is_duplicate] for table in self.values()]
            sums["on the host"] = list(map(sum, on_host))
        totals = [(name, "", "", "", *(f"{nbytes:,}" for nbytes in line)) for name, line in sums.items()]
        return (*_HEADER[:4], *self), rows, totals

    def to_dict(self) -> dict[str, Any]:
        """Returns the comparison as plain Python values."""
        return {name: table.to_dict() for name, table in self.items()}


_Policy = Callable[..., Any] | str | None
_Policies = Mapping[str, _Policy] | Sequence[_Policy]


@overload
def residuals(
    f: Callable[..., Any], /, *args: Any, argnums: int | Sequence[int] | None = None, policies: None = None
) -> ResidualTable: ...


@overload
def residuals(
    f: Callable[..., Any], /, *args: Any, argnums: int | Sequence[int] | None = None, policies: _Policies
) -> ResidualComparison: ...


def residuals(
    f: Callable[..., Any],
    /,
    *args: Any,
    argnums: int | Sequence[int] | None = None,
    policies: _Policies | None = None,
) -> ResidualTable | ResidualComparison:
    """Lists the arrays that reverse mode saves for the backward pass of `f`, and which Function saved each of them.

    `f` is traced, not executed, with its checkpoint policies, hooks and transformations. The total equals the size of
    the pullback of `jax.vjp`. XLA may store less, since it rematerializes and shares memory.

    Args:
      f: A function of pytrees of arrays. It may call jaxfn Functions.
      *args: Example arguments: arrays, models of flax or equinox, or any Python value. `jax.ShapeDtypeStruct` is
        accepted in place of an array.
      argnums: The arguments to differentiate with respect to, as in `jax.grad`. Default: all. Arguments that are not
        differentiated need no residuals, so pass what the training step passes. If such an argument has leaves that
        `jax.grad` does not accept (functions, strings, Python integers and booleans), it is differentiated with respect
        to its arrays only, as by `equinox.filter_grad`.
      policies: Checkpoint policies to compare, by name or in a list: each the `policy` of `jax.checkpoint(f,
        policy=...)`, of which `None` saves only arguments, or its name in `jax.checkpoint_policies`.

    Returns:
      A `ResidualTable` with one row per array and Function, in the order of the pullback's arrays, without arrays of
      size 0. `print` formats it; tests can assert its `total_bytes` and `bytes_by_function`. With `policies`, a
      `ResidualComparison`: the table "no checkpoint" of `f`, and one for each policy.

    Raises:
      TypeError: An output is not an array, an argument in `argnums` has no array or float, or a policy is not one.
      ValueError: `argnums` names an argument that was not passed, or two policies in a list have one name.

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
      >>> for row in ledger:  # print(ledger) formats them as a table
      ...     print(row.function, row.name, row.role, row.nbytes)
      swish x input 4000
      JAX cos intermediate 4000
      >>> assert ledger.total_bytes == 8000
      >>> everything = jax.checkpoint_policies.everything_saveable
      >>> jaxfn.residuals(lambda x: jnp.sin(swish(x)), x, policies={"none": None, "all": everything}).total_bytes
      {'no checkpoint': 8000, 'none': 4000, 'all': 8000}

    JAX counterpart: `jax.ad_checkpoint.print_saved_residuals`.
    """
    f, args = as_function(f, "residuals"), with_arrays(args)
    chosen = range(len(args)) if argnums is None else np.atleast_1d(argnums).tolist()
    if any(not -len(args) <= i < len(args) for i in chosen):
        raise ValueError(f"residuals: argnums={argnums}, but {len(args)} arguments were passed.")
    differentiated = {i % len(args): _differentiated(args[i]) for i in chosen}
    for i, found in differentiated.items():
        is_required = argnums is not None or not any(differentiated.values())
        if not found and is_required and jax.tree_util.tree_leaves(args[i]):
            raise TypeError(
                f"residuals: args[{i}], of type {type(args[i]).__name__}, has no array or float to differentiate with "
                "respect to. Pass the arguments that have some: residuals(..., argnums=...)."
            )

    def table(transform: Callable[[Any], Any]) -> ResidualTable:
        with noting_packed_arguments("residuals", args):
            return ResidualTable(list(_Passes(transform, f, args, differentiated).rows()))

    if policies is None:
        return table(lambda f: f)
    named = _policies_by_name(policies).items()
    compared = {name: table(partial(jax.checkpoint, policy=policy)) for name, policy in named}
    return ResidualComparison({"no checkpoint": table(lambda f: f)} | compared)


def _policies_by_name(policies: _Policies) -> dict[str, Any]:
    if not isinstance(policies, Mapping):
        names = [policy if isinstance(policy, str) else getattr(policy, "__name__", str(policy)) for policy in policies]
        if len({*names}) < len(names):
            raise ValueError(f"residuals: policies= has {', '.join(names)}. Pass a dict, with a name for each.")
        policies = dict(zip(names, policies, strict=True))
    found: dict[str, Any] = {}
    for name, policy in policies.items():
        found[name] = getattr(jax.checkpoint_policies, policy, None) if isinstance(policy, str) else policy
        kinds = [p.kind for p in inspect.signature(found[name]).parameters.values()] if callable(found[name]) else []
        if policy is not None and inspect.Parameter.VAR_KEYWORD not in kinds:  # it is called with an eqn's params
            raise TypeError(
                f"residuals: policies[{name!r}] is {policy!r}, expected a jax.checkpoint policy, the name of one in "
                "jax.checkpoint_policies, or None."
            )
    return found


class _Passes:
    """The forward and the backward pass of a function as jaxprs; the backward pass has labels."""

    def __init__(
        self,
        transform: Callable[[Any], Any],
        f: Callable[..., Any],
        args: tuple[Any, ...],
        leaves_by_argument: Mapping[int, Sequence[int]],
    ) -> None:
        trees: list[Any] = []
        paths, tree_of_args = jax.tree_util.tree_flatten_with_path(args)
        leaves = [leaf for _, leaf in paths]
        arrays = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]
        starts = [0, *itertools.accumulate(len(jax.tree_util.tree_leaves(arg)) for arg in args)]
        differentiated = [starts[argument] + i for argument, found in leaves_by_argument.items() for i in found]
        operands = sorted({*arrays, *differentiated})

        @transform
        def function_of_operands(*values: Any) -> Any:
            # Unflattened here, since a module of flax can only be mutated under the trace that unflattens it.
            return f(*jax.tree_util.tree_unflatten(tree_of_args, replace_at(operands, leaves, values)))

        def forward(*values: Any) -> tuple[list[Any], list[Any]]:
            current = replace_at(arrays, leaves, values)

            def function_of_differentiated(*values: Any) -> Any:
                merged = replace_at(differentiated, current, values)
                return function_of_operands(*(merged[i] for i in operands))

            output, pullback = jax.vjp(function_of_differentiated, *(current[i] for i in differentiated))
            outputs, (saved, tree) = jax.tree_util.tree_leaves(output), jax.tree_util.tree_flatten(pullback)
            trees[:] = tree, jax.tree_util.tree_structure(output)
            return outputs, saved

        with RECORD(PartitionRecord()), OBSERVATION(Observation.LINES):
            self._forward, _ = open_jaxpr(jax.make_jaxpr(forward)(*(leaves[i] for i in arrays)))
        pullback_tree, output_tree = trees
        num_outputs = output_tree.num_leaves
        self._outputs = self._forward.outvars[:num_outputs]
        self._saved = self._forward.outvars[num_outputs:]
        names = [f"args{jax.tree_util.keystr(paths[i][0])}" for i in arrays]
        self._arguments = dict(zip(self._forward.invars, names, strict=True))

        def backward(saved: Sequence[Any], cotangents: Sequence[Any]) -> Any:
            zeros = [np.zeros(v.aval.shape, jax.float0) for v in outputs]
            filled = [zero if ct is None else ct for ct, zero in zip(cotangents, zeros, strict=True)]
            pullback: Any = jax.tree_util.tree_unflatten(pullback_tree, saved)
            return pullback(jax.tree_util.tree_unflatten(output_tree, filled))

        outputs = self._outputs
        cotangents = [_like(v.aval) if jnp.issubdtype(v.aval.dtype, jnp.inexact) else None for v in outputs]
        with RECORD(PartitionRecord()), OBSERVATION(Observation.RESIDUALS):
            self._backward, _ = open_jaxpr(make_jaxpr(backward, [_like(v.aval) for v in self._saved], cotangents))

    def rows(self) -> Iterator[Residual]:
        """Yields a row for each residual array and each Function that reads it."""
        seen: set[Any] = set()
        constants, outputs = set(self._forward.constvars), set(filter(is_variable, self._outputs))
        origins = _origins(self._forward, [_NO_ORIGIN] * len(self._forward.invars))
        all_readers = _readers(self._backward, [[] for _ in self._backward.outvars], ())
        for saved, read in zip(self._saved, self._backward.invars, strict=False):
            nbytes = math.prod(saved.aval.shape) * saved.aval.dtype.itemsize
            if not nbytes:
                continue
            is_traced = is_variable(saved)
            argument = self._arguments.get(saved, "") if is_traced else ""
            operation, location = origins.get(saved, _NO_ORIGIN) if is_traced else _NO_ORIGIN
            row = Residual(
                "JAX",
                argument or operation,
                saved.aval.shape,
                str(saved.aval.dtype),
                nbytes,
                "input" if argument else "intermediate",
                argument=argument,
                location=location,
                is_on_host=is_traced and saved.aval.memory_space == jax.memory.Space.Host,
            )
            if not is_traced or saved in constants:
                row = row._replace(role="constant")
            elif saved in outputs:
                row = row._replace(role="output")
            readers = all_readers.get(read, [])
            by_functions = [reader for reader in readers if reader[0] is not None]
            for label, enclosing in by_functions or readers[:1] or [(None, ())]:
                is_duplicate = is_traced and saved in seen
                if is_traced:
                    seen.add(saved)
                reader_row = row._replace(enclosing=enclosing, is_duplicate=is_duplicate)
                if label is not None:
                    reader_row = reader_row._replace(
                        function=label.function,
                        name=label.name,
                        role=label.source,
                        is_packed=label.is_packed,
                        factors=label.factors,
                    )
                yield reader_row


def _differentiated(argument: Any) -> list[int]:
    """Returns the indices of the leaves with respect to which an argument is differentiated."""
    leaves = jax.tree_util.tree_leaves(argument)
    is_accepted_by_grad = all(_is_array(leaf) or _is_inexact_number(leaf) for leaf in leaves)
    return [i for i, leaf in enumerate(leaves) if is_accepted_by_grad or _is_array(leaf)]


def _is_array(leaf: Any) -> bool:
    """Whether a leaf is an argument of the jaxpr. Numbers, also of NumPy, become literals."""
    if isinstance(leaf, (np.ndarray, np.generic)):
        return isinstance(leaf, np.ndarray) and is_array_leaf(leaf)
    return is_array_leaf(leaf) or isinstance(leaf, (jax.ShapeDtypeStruct, AbstractValue))


def _is_inexact_number(leaf: Any) -> bool:
    return isinstance(leaf, (float, complex)) or (isinstance(leaf, np.generic) and is_inexact(leaf.dtype))


def _like(aval: Any) -> Any:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


# Primitives that only move or rename their operands.
_DATA_MOVEMENT = primitives("reshape squeeze broadcast_in_dim copy pvary optimization_barrier") | {
    name_p,
    tie_p,
}


# `jax.checkpoint` rounds what it saves to the precision that it has, and moves it by a policy that offloads.
_ADDED_BY_CHECKPOINT = primitives("reduce_precision device_put")

_Reader = tuple[Label | None, tuple[str, ...]]


def _readers(jaxpr: Any, of_outputs: Sequence[list[_Reader]], enclosing: tuple[str, ...]) -> dict[Any, list[_Reader]]:
    """Returns what reads each variable: labels of Functions, or `None` for JAX itself, each with what encloses it."""
    readers: dict[Any, list[_Reader]] = {}
    for atom, of_output in zip(jaxpr.outvars, of_outputs, strict=True):
        if is_variable(atom):
            readers[atom] = [*readers.get(atom, []), *of_output]
    for eqn in reversed(jaxpr.eqns):
        of_results = [readers.get(v, []) for v in eqn.outvars]
        inner = subjaxprs(eqn)
        found: list[list[_Reader]] = [[] if inner else [(None, enclosing)] for _ in eqn.invars]
        if eqn.primitive is label_p:
            found = [[(label, enclosing)] for label in eqn.params["labels"]]
        elif is_any_of(eqn, _DATA_MOVEMENT):
            found[: len(of_results)] = [of_result or [(None, enclosing)] for of_result in of_results]
        for sub in inner:
            of_inner = [[] if result is None else of_results[result] for result in sub.results]
            inside = _readers(sub.jaxpr, of_inner, (*enclosing, *_named(sub)))
            for invar, operand in zip(sub.jaxpr.invars, sub.operands, strict=True):
                found[operand] = found[operand] + inside.get(invar, [])
        by_atom: dict[Any, list[_Reader]] = {}
        for atom, own in zip(eqn.invars, found, strict=True):
            if is_variable(atom):
                by_atom[atom] = list(dict.fromkeys([*by_atom.get(atom, []), *own]))
        readers |= {atom: own + readers.get(atom, []) for atom, own in by_atom.items()}
    return readers


class _Provenance(NamedTuple):
    """The operation that computes a variable, or its name by `checkpoint_name`; and its location."""

    operation: str
    location: str


_NO_ORIGIN = _Provenance("", "")


def _origins(jaxpr: Any, of_inputs: Sequence[_Provenance]) -> dict[Any, _Provenance]:
    """Returns the origin of each variable; `_NO_ORIGIN` if no operation computes it."""
    origins = dict(zip(jaxpr.invars, of_inputs, strict=True))
    for eqn in jaxpr.eqns:
        of_operands = [origins.get(atom, _NO_ORIGIN) if is_variable(atom) else _NO_ORIGIN for atom in eqn.invars]
        own = _Provenance(eqn.params["name"] if eqn.primitive is name_p else eqn.primitive.name, eqn_source_line(eqn))
        found = [own] * len(eqn.outvars)
        if is_any_of(eqn, _DATA_MOVEMENT | _ADDED_BY_CHECKPOINT) and eqn.primitive is not name_p:
            found = [own if origin is _NO_ORIGIN else origin for origin in of_operands[: len(found)]]
        for sub in reversed(subjaxprs(eqn)):  # of a `cond`, the first branch
            carried = {argument for _, argument in sub.carried}
            carry = _Provenance("carry", own.location)
            inside = _origins(
                sub.jaxpr, [carry if i in carried else of_operands[operand] for i, operand in enumerate(sub.operands)]
            )
            for result, atom in zip(sub.results, sub.jaxpr.outvars, strict=True):
                if result is not None:
                    found[result] = inside.get(atom, _NO_ORIGIN) if is_variable(atom) else _NO_ORIGIN
        origins.update(zip(eqn.outvars, found, strict=True))
    return origins


def _named(sub: SubJaxpr) -> tuple[str, ...]:
    if sub.kind == "scan":
        return (f"scan of {sub.length}",)
    return () if sub.kind in ("call", "jit") else (sub.kind,)
