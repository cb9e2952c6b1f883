"""Comparison of the shape and dtype of JAX code with those that torch had, before the code is run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from jaxfn._port.source import helpers
from jaxfn._port.source.observe import ObservedTensor
from jaxfn._port.source.spelling import NoRuleError, fields
from jaxfn._torch import ties
from jaxfn._torch.values.arrays import to_jax

_RTOL = 1e-4
_PYTHON_DTYPES = {torch.bool: "bool", torch.int64: "int", torch.float64: "float", torch.complex128: "complex"}


def dtype_text(dtype: torch.dtype) -> str:
    """Returns a dtype as JAX code. 64-bit dtypes are Python's, which are 32-bit ones with x64 off."""
    return _PYTHON_DTYPES.get(dtype) or f"jnp.{str(dtype).removeprefix('torch.')}"


def numpy_dtype(dtype: torch.dtype) -> Any:
    """Returns the NumPy dtype of a torch dtype."""
    return jnp.dtype(str(dtype).removeprefix("torch."))


class OtherValuesError(Exception):
    """JAX code computes other values than torch did. The caller adds the line."""


class TemplateCheck:
    """Evaluates the shapes and dtypes of templates; their values too if `has_values`."""

    def __init__(self, has_values: bool) -> None:
        self._names = {"jax": jax, "jnp": jnp, "np": np, "lax": lax, **vars(ties), **vars(helpers)}
        self._has_values = has_values

    def shape(self, template: str, values: Mapping[str, Any], expected: Any) -> None:
        """Raises `NoRuleError` if a template fails for these arguments, or has another shape than torch's result."""
        results_of_torch: Any = expected if isinstance(expected, tuple) else (expected,)
        has_tensors = any(isinstance(x, ObservedTensor) for x in results_of_torch)
        if not has_tensors or not _is_checkable(values):
            return
        results = self._evaluate(template, values, x64=False)
        if isinstance(expected, ObservedTensor) and not isinstance(results, (tuple, list)):
            found = getattr(results, "shape", ())
            if tuple(found) != expected.shape:
                raise NoRuleError(f"JAX's result has the shape {tuple(found)}, torch's {expected.shape}")
        if self._has_values and "{key}" not in template:
            self._compare_values(template, values, expected)

    def _compare_values(self, template: str, values: Mapping[str, Any], expected: Any) -> None:
        """Raises `OtherValuesError` if a template has other values than torch's result had."""
        observed = [x for x in jax.tree_util.tree_leaves([*values.values()]) if isinstance(x, ObservedTensor)]
        if any(x.value is None for x in observed):
            return
        found = jax.tree_util.tree_leaves(self._evaluate(template, values, x64=False, is_concrete=True))
        for ours, theirs in zip(found, jax.tree_util.tree_leaves(expected), strict=False):
            if isinstance(theirs, ObservedTensor) and theirs.value is not None and theirs.value.numel():
                wanted = np.asarray(to_jax(theirs.value))
                kind = complex if wanted.dtype.kind == "c" else float
                a, b = np.asarray(ours).astype(kind), wanted.astype(kind)
                is_close = np.isclose(
                    a, b, rtol=_RTOL, atol=_RTOL * np.abs(b[np.isfinite(b)]).max(initial=0), equal_nan=True
                )
                if not is_close.all():
                    i = tuple(np.argwhere(~is_close)[0])
                    raise OtherValuesError(
                        f"torch has {b[i]:.6g} here, and `{template}` {a[i]:.6g} at {[*map(int, i)]}"
                    )

    def cast(self, template: str, values: Mapping[str, Any], expected: ObservedTensor) -> bool:
        """Whether JAX's result has another dtype than torch's, with x64 on or off."""
        if not _is_checkable(values):
            return False
        for x64 in (False, True):
            result = self._evaluate(template, values, x64)
            with jax.enable_x64(x64):
                dtype = jax.dtypes.canonicalize_dtype(numpy_dtype(expected.dtype))
            if hasattr(result, "dtype") and result.dtype != dtype:
                return True
        return False

    def _evaluate(self, template: str, values: Mapping[str, Any], x64: bool, is_concrete: bool = False) -> Any:
        code = re.sub(r"\{(\w+)(:[^}]*)?\}", r"_\1", template)
        code = re.sub(r"_(\w+_args)\b", r"*_\1", code)
        code = f"(\n{code}\n)"  # It may span lines.
        arrays: dict[str, Any] = {}
        with jax.enable_x64(x64):
            for name in {*fields(template)}:
                if name == "key":
                    arrays["_key"] = jax.random.key(0)
                else:
                    arrays[f"_{name}"] = _abstract(values.get(name), is_concrete)
            is_abstract = {n: any(map(_is_abstract, jax.tree_util.tree_leaves(v))) for n, v in arrays.items()}
            static = {name: value for name, value in arrays.items() if not is_abstract[name]}
            traced = {name: value for name, value in arrays.items() if is_abstract[name]}
            try:
                function = partial(eval, code, self._names | static)
                return jax.jit(function)(traced) if is_concrete else jax.eval_shape(function, traced)
            except Exception as error:
                raise NoRuleError(f"`{template}` fails: {str(error).splitlines()[0]}") from error


def _is_checkable(values: Mapping[str, Any]) -> bool:
    return not any(callable(x) and not isinstance(x, (type, torch.dtype)) for x in values.values())


def _is_abstract(value: Any) -> bool:
    return isinstance(value, (jax.ShapeDtypeStruct, jax.Array))


def _abstract(value: Any, is_concrete: bool) -> Any:
    if isinstance(value, ObservedTensor) and is_concrete:
        return to_jax(value.value) if value.value is not None else None
    if isinstance(value, ObservedTensor):
        return jax.ShapeDtypeStruct(value.shape, jax.dtypes.canonicalize_dtype(numpy_dtype(value.dtype)))
    if isinstance(value, torch.dtype):
        return jax.dtypes.canonicalize_dtype(numpy_dtype(value))
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (list, tuple)):
        items = [_abstract(x, is_concrete) for x in value]
        return items if isinstance(value, list) else tuple(items)
    return value
