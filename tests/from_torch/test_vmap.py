"""Contract rows H1 and E3: a torch Function's own `vmap` is converted, next to torch's vmap on equal numbers."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

import jaxfn
from tests.support.contexts import CONTEXTS
from tests.support.marks import row
from tests.support.runs import noting_runs

torch = pytest.importorskip("torch")

GENERATOR = np.random.default_rng(0)
X, Y = (GENERATOR.standard_normal((4, 3, 5)).astype(np.float32) for _ in range(2))


class Scaled(torch.autograd.Function):
    """Its vmap gives twice as much as its forward, so that it shows which of them ran."""

    @staticmethod
    def forward(x, factor):
        return x * factor

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output * ctx.factor, None

    @staticmethod
    def vmap(info, in_dims, x, factor):
        assert in_dims[1] is None
        assert x.shape[in_dims[0]] == info.batch_size
        return 2 * x * factor, in_dims[0]


class Several(torch.autograd.Function):
    """Outputs with other batch axes than the inputs, one without; saves an intermediate of setup_context."""

    @staticmethod
    def forward(x, y):
        return x * y, y.sum() * 0 + 3

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, y = inputs
        ctx.save_for_backward(x, y, torch.sin(x))
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, grad_output, _):
        x, y, sine = ctx.saved_tensors
        return grad_output * y + 0 * sine, grad_output * x + grad_output * sine

    @staticmethod
    def vmap(info, in_dims, x, y):
        x = x.movedim(in_dims[0], -1) if in_dims[0] is not None else x.unsqueeze(-1)
        y = y.movedim(in_dims[1], -1) if in_dims[1] is not None else y.unsqueeze(-1)
        return (x * y, torch.full((), 3.0)), (-1, None)


class Nested(torch.autograd.Function):
    """Its vmap applies itself to the whole batch: the idiom of Functions that work for any number of rows."""

    @staticmethod
    def forward(x):
        return x.exp()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output * ctx.saved_tensors[0]

    @staticmethod
    def vmap(info, in_dims, x):
        return Nested.apply(x), in_dims[0]


def _same(got: Any, expected: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), torch.utils._pytree.tree_leaves(expected), strict=True):
        np.testing.assert_allclose(a, b.detach().numpy(), rtol=1e-6, atol=1e-6)


@row("E3")
@pytest.mark.parametrize("axis, context", [(0, "jit"), (1, "eager"), (2, "jit")])
def test_the_vmap_of_a_torch_function_is_used(axis: int, context: str):
    scaled, transform = jaxfn.from_torch(Scaled), CONTEXTS[context]
    got = transform(jax.vmap(lambda x: scaled.apply(x, 3.0), axis, axis))(X)
    _same(got, torch.vmap(lambda x: Scaled.apply(x, 3.0), axis, axis)(torch.tensor(X)))
    np.testing.assert_allclose(got, 6 * X, rtol=1e-6)
    np.testing.assert_allclose(transform(lambda x: scaled.apply(x, 3.0))(X), 3 * X, rtol=1e-6)


@row("H2")
def test_vmap_is_traced_once_for_each_way_of_batching():
    note, traces = noting_runs()

    class Counted(Scaled):
        @staticmethod
        def vmap(info, in_dims, x, factor):
            note("vmap")
            return Scaled.vmap(info, in_dims, x, factor)

    counted = jaxfn.from_torch(Counted)
    for axis, factor in [(0, 3.0), (0, 3.0), (0, 4.0)]:
        got = jax.vmap(lambda x, factor=factor: counted.apply(x, factor), axis, axis)(X)
        np.testing.assert_allclose(got, 2 * factor * X, rtol=1e-6)
    assert len(traces) == 2


@row("E3")
@pytest.mark.parametrize("in_dims", [(0, 0), (1, 2), (0, None), (None, 2)])
def test_several_outputs_and_axes(in_dims: tuple[int | None, int | None]):
    x, y = (v if d is not None else v[0] for v, d in zip((X, Y), in_dims, strict=True))
    if in_dims == (1, 2):
        y = np.moveaxis(Y, 1, 2)
    elif in_dims == (None, 2):
        y = np.moveaxis(Y, 0, 2)
    several = jaxfn.from_torch(Several)
    got = jax.vmap(several.apply, in_dims)(x, y)
    _same(got, torch.vmap(Several.apply, in_dims)(torch.tensor(x), torch.tensor(y)))


@row("E3")
@pytest.mark.parametrize("context", ["eager", "jit"])
@pytest.mark.parametrize("function, xs", [(Several, (X, Y)), (Nested, (X,))], ids=["Several", "Nested"])
def test_its_gradients_are_those_of_backward(function: Any, xs: Any, context: str):
    def loss(apply: Any, *xs: Any) -> Any:
        output = apply(*xs)
        return ((output[0] if isinstance(output, tuple) else output) ** 2).sum()

    tensors = [torch.tensor(x, requires_grad=True) for x in xs]
    sum(loss(function.apply, *rows) for rows in zip(*tensors, strict=True)).backward()
    expected = [tensor.grad for tensor in tensors]
    ours = functools.partial(loss, jaxfn.from_torch(function).apply)
    argnums = tuple(range(len(xs)))
    _same(CONTEXTS[context](jax.vmap(jax.grad(ours, argnums)))(*xs), expected)
    _same(CONTEXTS[context](jax.grad(lambda *xs: jax.vmap(ours)(*xs).sum(), argnums))(*xs), expected)


@row("E3")
def test_second_derivatives_of_a_batch():
    nested = jaxfn.from_torch(Nested)
    got = jax.vmap(jax.grad(jax.grad(nested.apply)))(X.ravel())
    np.testing.assert_allclose(got, np.exp(X.ravel()), rtol=1e-6)


@row("H5")
def test_random_numbers_in_vmap_take_one_key_for_the_batch():
    class Noise(torch.autograd.Function):
        forward = staticmethod(lambda x: x + torch.rand_like(x))
        setup_context = staticmethod(lambda ctx, inputs, output: None)
        backward = staticmethod(lambda ctx, grad_output: grad_output)
        vmap = staticmethod(lambda info, in_dims, x: (x + torch.rand_like(x), in_dims[0]))

    noise = jaxfn.from_torch(Noise)
    key = jax.random.key(0)
    drawn = jax.vmap(lambda x: noise.apply(x, key=key))(X) - X
    assert drawn.min() >= 0
    assert drawn.max() <= 1
    assert len(np.unique(np.round(drawn, 6))) > X.size // 2
    np.testing.assert_array_equal(drawn, jax.vmap(lambda x: noise.apply(x, key=key))(X) - X)
    with pytest.raises(jaxfn.TranslationError, match="Noise.vmap draws random numbers for the whole batch, by one key"):
        jax.vmap(lambda x, key: noise.apply(x, key=key))(X, jax.random.split(key, 4))
    with pytest.raises(jaxfn.TranslationError, match="Noise.forward draws random numbers, .*key"):
        jax.vmap(noise.apply)(X)


class Combined(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x * 2)
    backward = staticmethod(lambda ctx, grad_output: grad_output * 2)
    vmap = staticmethod(lambda info, in_dims, x: (x, in_dims[0]))


class Generated(Scaled):
    generate_vmap_rule = True


class Keywords(torch.autograd.Function):
    forward = staticmethod(lambda x, **options: x * options["factor"])
    setup_context = staticmethod(lambda ctx, inputs, output: None)
    backward = staticmethod(lambda ctx, grad_output: grad_output)
    vmap = staticmethod(lambda info, in_dims, x, **options: (x, in_dims[0]))


class Unique(Scaled):
    vmap = staticmethod(lambda info, in_dims, x, factor: (torch.unique(x), 0))


@row("E3", "H4")
@pytest.mark.parametrize(
    "function, options, error, message",
    [
        (Combined, {}, RuntimeError, "Combined, which has a vmap static method, so it must also .*setup_context"),
        (Generated, {"factor": 2.0}, RuntimeError, "Generated, but it has both generate_vmap_rule=True and a vmap"),
        (Keywords, {"factor": 2.0}, jaxfn.TranslationError, r"has a vmap, and its forward takes \*\*kwargs"),
        (Unique, {"factor": 2.0}, jaxfn.TranslationError, "Unique"),
    ],
    ids=["combined style", "generate_vmap_rule", "keywords", "unique"],
)
def test_a_vmap_that_cannot_be_used_raises_under_vmap_alone(function: Any, options: Any, error: Any, message: str):
    apply = jaxfn.from_torch(function).apply
    np.testing.assert_array_equal(apply(X, **options), 2 * X)
    with pytest.raises(error, match=message):
        jax.jit(jax.vmap(lambda x: apply(x, **options)))(X)
