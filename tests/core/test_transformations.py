"""Contract rows E that the matrix does not show: callbacks, kernels, nesting, and collectives of sharded programs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfn
from tests.support.cases import CASES, Square, loss_of, make_args
from tests.support.contexts import checkpoint, eager, jit
from tests.support.marks import row
from tests.support.transformations import BATCH, over_batch

LINEAR = next(case for case in CASES if case.name == "linear")


@row("E1")
def test_functions_nest_in_forward_and_backward():
    @jaxfn.function
    def outer(ctx, x):
        ctx.save_for_backward(x)
        return Square.apply(x) * x

    outer.backward(lambda ctx, g: 3 * g * Square.apply(ctx.saved_tensors[0]))
    f = outer
    for order, expected in enumerate((12.0, 12.0, 6.0), start=1):
        f = jax.grad(f)
        assert f(2.0) == jax.jit(f)(2.0) == expected, order


@row("E1")
def test_a_Function_whose_output_has_no_array_in_vmap_and_scan():
    def backward(ctx, grad_output):
        raise AssertionError("there is nothing to differentiate")

    f = jaxfn.autograd_function(lambda ctx, x, y: (None,), backward)

    def body(x, _):
        outputs, pullback = jax.vjp(jax.vmap(f, in_axes=(0, None), out_axes=None), x, jnp.zeros(1))
        assert outputs == (None,)
        return x + sum(map(jnp.sum, pullback((None,)))), None

    np.testing.assert_array_equal(jax.lax.scan(body, jnp.ones(2), None, length=3)[0], [1, 1])


@row("E1")
def test_a_function_among_the_arguments_whose_closure_is_converted():
    @jaxfn.function
    def cosine_of(ctx, g, x, *constants):
        ctx.save_for_backward(x, *constants)
        return jnp.cos(g(x, *constants))

    @cosine_of.backward
    def _(ctx, grad_output):
        x, *constants = ctx.saved_tensors
        return None, 17 * x, *(42 * c for c in constants)

    def solve(center, weight, x):
        converted, constants = jax.closure_convert(lambda x: jnp.sum(weight * (x - center) ** 2), x)
        return cosine_of(converted, x, *constants)

    center, ones = jnp.array([2.0, 2.0]), jnp.ones(2)
    np.testing.assert_allclose(solve(center, ones, ones), np.cos(2.0), rtol=1e-6)
    for scale in (1.0, 1.5):
        of_center, of_x = jax.grad(solve, (0, 2))(scale * center, 2 * ones, ones)
        np.testing.assert_allclose(of_center, 42 * scale * center)
        np.testing.assert_allclose(of_x, 17 * ones)


@row("E1")
@pytest.mark.parametrize("wrap", [eager, jit])
def test_a_pullback_that_is_stored_on_ctx(wrap):
    @jaxfn.function
    def f(ctx, x):
        y, ctx.pullback = jax.vjp(lambda x: 3 * x * x, x)
        return y

    f.backward(lambda ctx, g: ctx.pullback(g)[0])
    _, pullback = wrap(lambda x: jax.vjp(f, x))(jnp.float32(2))
    assert pullback(jnp.float32(1)) == (12,)


@row("D8")
@pytest.mark.parametrize(
    ("differentiated", "message"),
    [
        (lambda x: jnp.zeros(3), r"\['float32\[3\]'\] .* and \['float32\[\]'\] when nothing"),
        (
            lambda x: x.astype(jnp.bfloat16),
            r"\['bfloat16\[\]'\] .* and \['float32\[\]'\] when nothing",
        ),
        (lambda x: (x, x), r"tuple\(\(array, array\)\) .* and tuple\(array\) when nothing"),
    ],
    ids=["shape", "dtype", "structure"],
)
def test_an_output_in_scan_that_depends_on_the_flags_raises(differentiated, message):
    f = jaxfn.autograd_function(
        lambda ctx, x: (differentiated(x) if any(ctx.needs_input_grad) else x,), lambda ctx, g: g
    )
    loop = lambda x: jax.lax.scan(lambda c, _: (f(c)[0], None), x, length=1)[0]  # noqa: E731
    with pytest.raises(RuntimeError, match="forward returned " + message):
        jax.grad(loop)(1.0)


@row("C10", "E1")
def test_the_gradient_of_an_integer_is_float0_in_scan_too():
    f = jaxfn.autograd_function(lambda ctx, x, i: x * 1, lambda ctx, g: (2 * g, None))

    def loop(x, i):
        return jax.lax.scan(lambda xi, _: ((f(*xi), xi[1]), None), (x, i), None, length=2)[0][0]

    for g, expected in ((f, 2), (loop, 4)):
        of_x, of_i = jax.grad(g, (0, 1), allow_int=True)(2.0, 3)
        assert of_x == expected and of_i.dtype == jax.float0


def collectives(compiled):
    return sorted(re.findall(r" (all-[\w-]+|reduce-scatter|collective-[\w-]+)\(", compiled.as_text()))


@row("E2")
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_same_collectives_in_sharded_jit(axis_type):
    mesh = jax.make_mesh((BATCH,), ("d",), axis_types=(axis_type,))
    x, w, b = make_args(LINEAR, BATCH)
    args = (jax.device_put(x, NamedSharding(mesh, P("d"))), w, b)
    found = []
    with jax.set_mesh(mesh):
        for f in (LINEAR.apply, LINEAR.hand_written):
            gradient = jax.jit(jax.grad(loss_of(over_batch(LINEAR, f)), argnums=(0, 1, 2)))
            found.append(collectives(gradient.lower(*args).compile()))
    assert found[0] == found[1] != []


@row("E2")
@pytest.mark.parametrize("check_vma", [True, False])
def test_replicated_weights_inside_shard_map(check_vma):
    """Gradients taken inside: with check_vma they come out summed, as from plain JAX code."""
    mesh = jax.make_mesh((BATCH,), ("d",), axis_types=(AxisType.Auto,))
    x, (_, w, b) = jnp.arange(48.0).reshape(16, 3) / 50, make_args(LINEAR)

    def gradient(f):
        def local(x, w, b):
            grads = jax.grad(loss_of(f), argnums=(1, 2))(x, w, b)
            return grads if check_vma else jax.lax.psum(grads, "d")

        specs = (P("d"), P(), P())
        return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma))

    ours, plain = gradient(LINEAR.apply), gradient(LINEAR.reference)
    for got, expected in zip(ours(x, w, b), plain(x, w, b), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5)
    whole = jax.grad(loss_of(LINEAR.reference), argnums=(1, 2))(x, w, b)
    for got, expected in zip(ours(x, w, b), whole, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4)
    assert collectives(ours.lower(x, w, b).compile()) == collectives(plain.lower(x, w, b).compile())


@row("E2")
@pytest.mark.parametrize("materialize", [True, False])
def test_zeros_and_reverse_variance_inside_shard_map(materialize):
    """Zeros for an unused output, and an unvarying gradient for a varying input, have the right varying axes."""

    @jaxfn.function
    def f(ctx, x):
        ctx.set_materialize_grads(materialize)
        return x * 2, x * 3

    @f.backward
    def _(ctx, g, unused):
        assert (unused is None) != materialize
        return jnp.ones(3) if unused is None else g * 2 + unused

    mesh = jax.make_mesh((BATCH,), ("d",), axis_types=(AxisType.Auto,))
    gradient = jax.shard_map(jax.grad(lambda x: f(x)[0].sum()), mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    np.testing.assert_allclose(jax.jit(gradient)(jnp.ones(24)), np.full(24, 2.0 if materialize else 1.0))


def double_kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2.0


def call_kernel(x):
    return pl.pallas_call(double_kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


@row("E5")
@pytest.mark.parametrize("wrap", [eager, jit, checkpoint])
def test_a_pallas_kernel_in_forward_and_backward(wrap):
    double = jaxfn.autograd_function(lambda ctx, x: call_kernel(x), lambda ctx, g: call_kernel(g))
    x = jnp.arange(8.0)
    np.testing.assert_allclose(wrap(double)(x), 2 * x)
    np.testing.assert_allclose(jax.grad(lambda x: (wrap(double)(x) ** 2).sum())(x), 8 * x)
    np.testing.assert_allclose(jax.vmap(jax.grad(lambda x: wrap(double)(x).sum()))(x[None])[0], np.full(8, 2.0))


@row("E5")
@pytest.mark.parametrize("wrap", [eager, jit])
def test_an_ffi_call_in_forward_and_backward(wrap):
    """LAPACK's Cholesky factorization, which jaxlib itself registers, called as a user's own kernel would be."""

    jnp.linalg.cholesky(jnp.eye(2)).block_until_ready()  # has jaxlib set up its LAPACK calls

    def factor(a):
        info = jax.ShapeDtypeStruct((), np.int32)
        call = jax.ffi.ffi_call(
            "lapack_spotrf_ffi", (jax.ShapeDtypeStruct(a.shape, a.dtype), info), input_output_aliases={0: 0}
        )
        # LAPACK counts columns first; the upper factor there is the lower one here.
        return jnp.tril(call(a, uplo=np.uint8(ord("U")))[0])

    @jaxfn.function
    def logdet(ctx, a):
        ctx.save_for_backward(a)
        return 2 * jnp.log(jnp.diag(factor(a))).sum()

    @logdet.backward
    def _(ctx, g):
        (a,) = ctx.saved_tensors
        assert factor(a).shape == a.shape
        return g * jnp.linalg.inv(a)

    a = jnp.array([[4.0, 1.0], [1.0, 3.0]])
    np.testing.assert_allclose(wrap(logdet)(a), np.log(11.0), rtol=1e-5)
    np.testing.assert_allclose(wrap(jax.grad(logdet))(a), np.linalg.inv(a), rtol=1e-5)
