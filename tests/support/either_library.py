"""Tests that write a Function once, in JAX or torch, and assert equal numbers of both.

The expected numbers are written in NumPy, once. A test marked with `in_each_library` runs eagerly in JAX, under
`jax.jit` and, where it is installed, in torch, which makes the numbers independent of jaxfn; `in_every_context` adds
what JAX puts around a call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.contexts import CONTEXTS, eager
from tests.support.libraries import Jax, JittedJax, Library, torch_library

try:
    Torch: Library = torch_library()
except ImportError:
    Torch = None


def _in_context(name: str) -> Any:
    """JAX with this context around the function that is differentiated."""
    return pytest.param(type(f"Jax_{name}", (Jax,), {"around": staticmethod(CONTEXTS[name])}), id=f"grad of {name}")


_EACH = [
    pytest.param(Jax, id="jax"),
    pytest.param(JittedJax, id="jit"),
    pytest.param(Torch, id="torch", marks=pytest.mark.skipif(Torch is None, reason="torch is not installed")),
]
_CONTEXTS = [_in_context(name) for name in CONTEXTS if name != "eager"]


def _in_libraries(libraries: Sequence[Any]) -> Callable[[Any], Any]:
    marks = [pytest.mark.usefixtures("double_precision"), pytest.mark.parametrize("lib", libraries)]
    return lambda test: reduce(lambda test, mark: mark(test), marks, test)


in_each_library = _in_libraries(_EACH)
in_every_context = _in_libraries([*_EACH, *_CONTEXTS])


def function_in(library: Library, forward: Any, backward: Any = None, name: str = "Example", **attributes: Any) -> Any:
    """Returns the call of a Function with these methods."""
    methods = {"forward": staticmethod(forward), **({"backward": staticmethod(backward)} if backward else {})}
    return type(name, (library.Function,), methods | attributes).apply


X = np.array([[0.3, -1.2], [2.1, 0.7], [-0.4, 1.6]])


def cotangent(shape: tuple[int, ...], position: int = 0) -> np.ndarray:
    """The gradient that `gradients` gives to the output at that position."""
    return np.cos(np.arange(float(np.prod(shape))) + 0.5 + position).reshape(shape)


G = cotangent(X.shape)


def _loss(library: Library, outputs: Any) -> Any:
    """The sum of the floating outputs, each times its `cotangent`."""
    total = 0.0
    for position, y in enumerate(_several(outputs)):
        if "float" in str(getattr(y, "dtype", "")):
            total = total + (library.m.asarray(cotangent(tuple(y.shape), position), dtype=y.dtype) * y).sum()
    return total


def gradients(library: Library, f: Callable[..., Any], *args: Any, order: int = 1) -> list[np.ndarray]:
    """The gradients of all floating arguments, for outputs with the gradients `cotangent`.

    Args:
      order: 2 gives the gradients of the gradients, which get such cotangents too, and so on.
    """
    arrays = [np.asarray(a) for a in args]
    if library is Torch:
        tensors = Torch.tensors(arrays)
        inputs = [t for t in tensors if t.requires_grad]
        values = f(*tensors)
        for _ in range(order - 1):
            values = Torch.m.autograd.grad(_loss(Torch, values), inputs, create_graph=True)
        if (target := _loss(Torch, values)).requires_grad:
            target.backward()  # autograd.grad would not see what must not be differentiated
        return [Torch.numpy(t.grad if t.grad is not None else Torch.m.zeros_like(t)) for t in inputs]
    argnums = [i for i, a in enumerate(arrays) if np.issubdtype(a.dtype, np.inexact)]

    def derivative(*args: Any) -> Any:  # no context passes on what is not an array
        return [y if hasattr(y, "dtype") else 0 for y in _several(f(*args))]

    derivative = getattr(library, "around", eager)(derivative)
    for _ in range(order):
        derivative = (lambda g: jax.grad(lambda *a: _loss(library, g(*a)), argnums))(derivative)
    return [np.asarray(value) for value in library.wrap(derivative)(*map(jnp.asarray, arrays))]


def _several(outputs: Any) -> Sequence[Any]:
    return outputs if isinstance(outputs, (tuple, list)) else [outputs]


def assert_gradients(
    library: Library, f: Callable[..., Any], args: Sequence[Any], *expected: Any, order: int = 1
) -> None:
    """Asserts shapes and values of `gradients`."""
    for got, want in zip(gradients(library, f, *args, order=order), expected, strict=True):
        assert got.shape == np.shape(want)
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)


@contextlib.contextmanager
def raises(library: Library, kind: type[Exception], words: str, more: str = "") -> Iterator[None]:
    """Asserts that an error is raised.

    Args:
      kind: its class in JAX.
      words: matches the messages of both libraries.
      more: is in JAX's message too.
    """
    with pytest.raises(kind if library is not Torch else (RuntimeError, TypeError), match=words) as caught:
        yield
    if library is not Torch:
        assert more in str(caught.value)


def described(value: Any) -> Any:
    """An argument of backward, comparable between the libraries: its dtype and shape, or `None`."""
    return value if value is None else (str(value.dtype).removeprefix("torch."), tuple(value.shape))
