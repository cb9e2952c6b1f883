"""torch and jaxfn under common names, so that one source is built on both.

A *definition* is a function of a library (`Jax`, `JittedJax` or `torch_library()`) that writes a Function in it and
returns what calls it. Gradients are compared in torch's convention: JAX's of a complex input is the conjugate.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import jaxfn

Library = Any
Define = Callable[[Library], Callable[..., Any]]
Kind = Literal["gradcheck", "gradgradcheck"]


class Jax:
    """JAX with jaxfn."""

    Function = jaxfn.Function
    GradcheckError = jaxfn.GradcheckError
    once_differentiable = staticmethod(jaxfn.once_differentiable)
    m = jnp
    nn = jax.nn
    array = staticmethod(jnp.asarray)
    numpy = staticmethod(np.asarray)
    wrap = staticmethod(lambda f: f)
    detach = staticmethod(jax.lax.stop_gradient)
    while_loop = staticmethod(jax.lax.while_loop)

    @staticmethod
    def as_float32(x: Any) -> Any:
        return x.astype(jnp.float32)

    @staticmethod
    def scatter_add(length: int, index: Any, values: Any) -> Any:
        """An array of that length (along its first axis) with `values` added at `index`."""
        return jnp.zeros((length, *values.shape[1:]), values.dtype).at[index].add(values)

    @staticmethod
    def scatter_set(length: int, index: Any, values: Any) -> Any:
        return jnp.zeros((length, *values.shape[1:]), values.dtype).at[index].set(values)

    @staticmethod
    def on_host(f: Callable[[np.ndarray], np.ndarray], x: Any) -> Any:
        """A NumPy function of one array, whose result is like it."""
        return jax.pure_callback(f, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential")

    @staticmethod
    def check(kind: Kind, f: Callable[..., Any], args: tuple[Any, ...], **keywords: Any) -> bool:
        return getattr(jaxfn, kind)(f, args, **keywords)

    @classmethod
    def outputs(cls, f: Callable[..., Any], args: Sequence[np.ndarray]) -> Any:
        return cls.wrap(f)(*map(jnp.asarray, args))

    @classmethod
    def derivatives(cls, f: Callable[..., Any], args: Sequence[np.ndarray], order: int) -> list[list[np.ndarray]]:
        """The arrays that `f` returns, then their first, second, ... derivatives; see `loss`.

        Derivatives are with respect to every floating or complex argument.
        """
        of_order = [lambda *a: _arrays(f(*a))]
        for _ in range(order):
            of_order.append(gradient_of(of_order[-1], args))
        found = cls.wrap(lambda *a: [g(*a) for g in of_order])(*map(jnp.asarray, args))
        return [found[0], *([jnp.conj(value) for value in values] for values in found[1:])]

    @classmethod
    def gradients(cls, f: Callable[..., Any], args: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The first derivatives alone."""
        return [np.conj(v) for v in cls.wrap(gradient_of(f, args))(*map(jnp.asarray, args))]


class JittedJax(Jax):
    """jaxfn under `jax.jit`."""

    wrap = staticmethod(jax.jit)


def _is_inexact(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)


def gradient_of(f: Callable[..., Any], args: Sequence[np.ndarray]) -> Callable[..., Any]:
    """The gradients of `loss` by every floating or complex argument."""
    argnums = [i for i, a in enumerate(args) if _is_inexact(jnp.result_type(a))]
    return jax.grad(lambda *a: loss(Jax, _arrays(f(*a))), argnums=argnums)


def _arrays(outputs: Any) -> list[Any]:
    return [y for y in (outputs if isinstance(outputs, (tuple, list)) else [outputs]) if hasattr(y, "dtype")]


def loss(library: Library, values: Sequence[Any]) -> Any:
    """A real number that depends on every floating and complex value, and not linearly.

    It is equal for a complex value and for its conjugate.
    """
    total = 0.0
    for value in values:
        kind = str(value.dtype).removeprefix("torch.")
        if kind.startswith(("float", "bfloat", "complex")):
            weights = np.cos(np.arange(float(np.prod(value.shape))) + 0.5).reshape(value.shape)
            size = library.m.real(value * (library.m.conj(value) + 1)) if kind[0] == "c" else value * (value + 1)
            total = total + (library.m.asarray(weights, dtype=size.dtype) * size).sum()
    return total


@functools.cache
def torch_library() -> Library:
    """PyTorch; raises ImportError where it is not installed."""
    import torch
    from torch.autograd.gradcheck import GradcheckError as TorchGradcheckError

    class Torch:
        Function = torch.autograd.Function
        GradcheckError = TorchGradcheckError
        once_differentiable = staticmethod(torch.autograd.function.once_differentiable)
        m = torch
        nn = torch.nn.functional
        array = staticmethod(torch.tensor)

        @staticmethod
        def numpy(value: Any) -> np.ndarray:
            return value.detach().resolve_conj().numpy()

        @staticmethod
        def detach(x: Any) -> Any:
            return x.detach()

        @staticmethod
        def while_loop(condition: Callable[[Any], Any], body: Callable[[Any], Any], state: Any) -> Any:
            while condition(state):
                state = body(state)
            return state

        @staticmethod
        def as_float32(x: Any) -> Any:
            return x.to(torch.float32)

        @staticmethod
        def scatter_add(length: int, index: Any, values: Any) -> Any:
            return values.new_zeros(length, *values.shape[1:]).index_add(0, index, values)

        @staticmethod
        def scatter_set(length: int, index: Any, values: Any) -> Any:
            return values.new_zeros(length, *values.shape[1:]).index_copy(0, index, values)

        @staticmethod
        def on_host(f: Callable[[np.ndarray], np.ndarray], x: Any) -> Any:
            return torch.from_numpy(f(x.detach().numpy()))

        @staticmethod
        def tensors(args: Sequence[Any], argnums: Sequence[int] | None = None) -> tuple[Any, ...]:
            """NumPy arrays as tensors with equal strides; pytrees are flattened, everything else is unchanged."""
            chosen = range(len(args)) if argnums is None else argnums
            converted: list[Any] = []
            for position, arg in enumerate(args):
                for leaf in arg.values() if isinstance(arg, dict) else [arg]:
                    if isinstance(leaf, np.ndarray):
                        floating = _is_inexact(leaf.dtype)
                        # NumPy gives an empty array strides that torch rejects.
                        layout = torch.preserve_format if leaf.size else torch.contiguous_format
                        leaf = torch.from_numpy(leaf).clone(memory_format=layout)
                        leaf.requires_grad_(floating and position in chosen)
                    converted.append(leaf)
            return tuple(converted)

        @classmethod
        def check(cls, kind: Kind, f: Callable[..., Any], args: tuple[Any, ...], **keywords: Any) -> bool:
            inputs = cls.tensors(args, keywords.pop("argnums", None))
            if "grad_outputs" in keywords:
                keywords["grad_outputs"] = cls.tensors(keywords["grad_outputs"])
            torch.manual_seed(0)  # fast mode's projections and gradgradcheck's gradients
            return getattr(torch.autograd, kind)(f, inputs, **keywords)

        @classmethod
        def outputs(cls, f: Callable[..., Any], args: Sequence[np.ndarray]) -> Any:
            return f(*cls.tensors([np.asarray(a) for a in args]))

        @classmethod
        def derivatives(cls, f: Callable[..., Any], args: Sequence[np.ndarray], order: int) -> list[list[np.ndarray]]:
            """Returns derivatives like `Jax.derivatives`."""
            tensors = cls.tensors([np.asarray(a) for a in args])
            inputs = [t for t in tensors if t.requires_grad]
            values = _arrays(f(*tensors))
            found = [[cls.numpy(value) for value in values]]
            for remaining in reversed(range(order)):
                target = loss(cls, values)
                if target.requires_grad:
                    values = torch.autograd.grad(target, inputs, create_graph=remaining > 0, materialize_grads=True)
                else:
                    values = [torch.zeros_like(t) for t in inputs]
                found.append([cls.numpy(value) for value in values])
            return found

        @classmethod
        def gradients(cls, f: Callable[..., Any], args: Sequence[np.ndarray]) -> list[np.ndarray]:
            """Returns gradients like `Jax.gradients`."""
            return cls.derivatives(f, args, 1)[1]

    return Torch


def of_arrays(function: Any, args: tuple[Any, ...]) -> tuple[Callable[..., Any], list[np.ndarray]]:
    """A function of the arrays among a Function's arguments, and those."""
    leaves, tree = jax.tree.flatten(args, is_leaf=lambda leaf: leaf is None)
    indices = [i for i, leaf in enumerate(leaves) if isinstance(leaf, np.ndarray)]

    def call(*arrays: Any) -> Any:
        filled = list(leaves)
        for index, array in zip(indices, arrays, strict=True):
            filled[index] = array
        return function.apply(*jax.tree.unflatten(tree, filled))

    return call, [leaves[i] for i in indices]


def inputs_saved(inputs: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
    return inputs


def output_saved(inputs: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
    return output if isinstance(output, tuple) else (output,)


def make_function(
    library: Library,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    save: Callable[[tuple[Any, ...], Any], tuple[Any, ...]] = inputs_saved,
    *,
    jvp: Callable[..., Any] | None = None,
    marked: int | None = None,
    materialize: bool = True,
    name: str = "Rule",
) -> Any:
    """Returns a Function class, built from two functions of arrays.

    Args:
      library: Its library.
      forward: The outputs, of the inputs.
      backward: The gradients, of the gradients of the outputs and then what was saved.
      save: What is saved, of the tuple of inputs and the outputs.
      jvp: The tangents of the outputs, of the tangents of the inputs and then what was saved.
      marked: The index of an output without derivative.
      materialize: Whether a missing gradient of an output is zeros.
      name: Its name.
    """

    class Rule(library.Function):
        @staticmethod
        def forward(ctx, *inputs):
            ctx.set_materialize_grads(materialize)
            output = forward(*inputs)
            if marked is not None:
                ctx.mark_non_differentiable(output[marked])
            saved = save(inputs, output)
            ctx.save_for_backward(*saved)
            if jvp is not None:
                ctx.save_for_forward(*saved)
            return output

        @staticmethod
        def backward(ctx, *grad_outputs):
            return backward(*grad_outputs, *ctx.saved_tensors)

    if jvp is not None:
        Rule.jvp = staticmethod(lambda ctx, *tangents: jvp(*tangents, *ctx.saved_tensors))
    Rule.__name__ = Rule.__qualname__ = name
    return Rule


def assert_same(got: Sequence[Any], want: Sequence[np.ndarray], rtol: float = 1e-9) -> None:
    """Compares outputs or gradients of JAX with those of torch."""
    for ours, theirs in zip(got, want, strict=True):
        assert np.shape(ours) == theirs.shape
        np.testing.assert_allclose(np.asarray(ours), theirs, rtol=rtol, atol=rtol)


def assert_derivatives_as_torch(
    ours: Callable[..., Any], theirs: Callable[..., Any], args: Sequence[np.ndarray], order: int = 2
) -> None:
    """Outputs and derivatives up to an order, eagerly and under jit, next to those of torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch
        want = torch_library().derivatives(theirs, args, order)
    for library in (Jax, JittedJax):
        for got, expected in zip(library.derivatives(ours, args, order), want, strict=True):
            assert_same(got, expected)
