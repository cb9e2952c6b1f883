"""Contract rows H1 and E3: a torch Function's own `vmap` is taken over, beside torch's vmap on the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.support.marks import row

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
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_the_vmap_of_a_torch_function_is_used(transform: Callable[..., Any], axis: int):
    scaled = jaxfn.from_torch(Scaled)
    got = transform(jax.vmap(lambda x: scaled.apply(x, 3.0), axis, axis))(X)
    _same(got, torch.vmap(lambda x: Scaled.apply(x, 3.0), axis, axis)(torch.tensor(X)))
    np.testing.assert_allclose(got, 6 * X, rtol=1e-6)
    np.testing.assert_allclose(transform(lambda x: scaled.apply(x, 3.0))(X), 3 * X, rtol=1e-6)


@row("H2")
def test_vmap_is_traced_once_for_each_way_of_batching():
    traces = []

    class Counted(Scaled):
        @staticmethod
        def vmap(info, in_dims, x, factor):
            traces.append(in_dims)
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
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("name", ["Several", "Nested"])
def test_its_gradients_are_those_of_backward(transform: Callable[..., Any], name: str):
    torch_function = globals()[name]
    function = jaxfn.from_torch(torch_function)
    xs = (X, Y) if name == "Several" else (X,)
    argnums = tuple(range(len(xs)))

    def loss(*xs: Any) -> Any:
        output = function.apply(*xs)
        return jnp.sum((output[0] if isinstance(output, tuple) else output) ** 2)

    def torch_loss(*xs: Any) -> Any:
        output = torch_function.apply(*xs)
        return ((output[0] if isinstance(output, tuple) else output) ** 2).sum()

    expected = torch.func.grad(lambda *xs: sum(torch_loss(*rows) for rows in zip(*xs, strict=True)), argnums)(
        *map(torch.tensor, xs)
    )
    _same(transform(jax.vmap(jax.grad(loss, argnums)))(*xs), expected)
    _same(transform(jax.grad(lambda *xs: jax.vmap(loss)(*xs).sum(), argnums))(*xs), expected)


@row("E3")
def test_second_derivatives_of_a_batch():
    nested = jaxfn.from_torch(Nested)
    got = jax.vmap(jax.grad(jax.grad(nested.apply)))(X.ravel())
    np.testing.assert_allclose(got, np.exp(X.ravel()), rtol=1e-6)


@row("H5")
def test_random_numbers_in_vmap_take_one_key_for_the_batch():
    class Noise(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x + torch.rand_like(x)

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, grad_output):
            return grad_output

        @staticmethod
        def vmap(info, in_dims, x):
            return x + torch.rand_like(x), in_dims[0]

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


@row("E3")
def test_what_torch_refuses_is_refused():
    class Combined(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x + 0

        @staticmethod
        def backward(ctx, grad_output):
            return grad_output

        @staticmethod
        def vmap(info, in_dims, x):
            return x, in_dims[0]

    combined = jaxfn.from_torch(Combined)
    np.testing.assert_array_equal(combined.apply(X), X)
    with pytest.raises(RuntimeError, match="Combined, which has a vmap static method, so it must also .*setup_context"):
        jax.vmap(combined.apply)(X)

    class Twice(Scaled):
        generate_vmap_rule = True

    with pytest.raises(RuntimeError, match="Twice, but it has both generate_vmap_rule=True and a vmap"):
        jax.vmap(lambda x: jaxfn.from_torch(Twice).apply(x, 2.0))(X)


@row("E3")
def test_keywords_in_vmap_are_refused():
    class Keywords(torch.autograd.Function):
        @staticmethod
        def forward(x, **options):
            return x * options["factor"]

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, grad_output):
            return grad_output

        @staticmethod
        def vmap(info, in_dims, x, **options):
            return x, in_dims[0]

    keywords = jaxfn.from_torch(Keywords)
    np.testing.assert_allclose(keywords.apply(X, factor=2.0), 2 * X)
    with pytest.raises(jaxfn.TranslationError, match=r"Keywords has a vmap, and its forward takes \*\*kwargs"):
        jax.vmap(lambda x: keywords.apply(x, factor=2.0))(X)


@row("H4")
def test_what_vmap_cannot_do_is_said():
    class Unique(Scaled):
        @staticmethod
        def vmap(info, in_dims, x, factor):
            return torch.unique(x), 0

    unique = jaxfn.from_torch(Unique)
    np.testing.assert_allclose(unique.apply(X, 2.0), 2 * X)
    with pytest.raises(jaxfn.TranslationError, match="Unique"):
        jax.vmap(lambda x: unique.apply(x, 2.0))(X)
