"""Mistakes of the first day, and what is said of them."""

import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from jaxfn import _compat
from tests.support.marks import row


@jaxfn.function
def cube(ctx, x):
    ctx.save_for_backward(x)
    return x**3


@cube.backward
@jaxfn.once_differentiable
def _(ctx, grad_output):
    (x,) = ctx.saved_tensors
    return 3 * x**2 * grad_output


@row("C14")
@pytest.mark.parametrize(
    "wrap",
    [
        lambda f: f,
        jax.jit,
        jax.checkpoint,
        lambda f: lambda x: jax.vmap(f)(x[None])[0],
        lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=1)[0],
    ],
    ids=["eager", "jit", "checkpoint", "vmap", "scan"],
)
def test_a_gradient_under_stop_gradient_may_be_differentiated_around(wrap):
    def stopped(x):
        return jax.lax.stop_gradient(jax.grad(cube)(x)) * x

    def used(x):
        return jax.grad(cube)(x) * x

    assert jax.grad(wrap(stopped))(2.0) == 12.0
    assert jax.jit(jax.grad(wrap(stopped)))(2.0) == 12.0
    for derivative in (jax.grad(wrap(used)), jax.jit(jax.grad(wrap(used)))):
        with pytest.raises(RuntimeError, match="trying to differentiate twice"):
            derivative(2.0)


@row("B4")
def test_a_python_number_that_would_be_an_array_under_grad():
    @jaxfn.function
    def square(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    square.backward(lambda ctx, g: 2 * g * ctx.saved_tensors[0])
    assert square(3.0) == 9.0
    assert jax.grad(square)(3.0) == 6.0


@row("B4")
def test_other_numbers_are_refused_as_before():
    constant = jaxfn.autograd_function(lambda ctx, x: ctx.save_for_backward(x, 2.5) or x, lambda ctx, g: g)
    with pytest.raises(TypeError, match="argument 1 is of type float"):
        constant(3.0)
    scaled = jaxfn.autograd_function(lambda ctx, x, c: ctx.save_for_backward(x, c) or x * c, lambda ctx, g: (g, None))
    assert scaled(2.0, 3.0) == 6.0
    with pytest.raises(TypeError, match="argument 1 is of type float"):
        jax.grad(lambda x: scaled(x, 3.0))(2.0)


class Forgets(jaxfn.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad_output):
        def inner():
            return grad_output  # of another function

        inner()


class Means(Forgets):
    @staticmethod
    def backward(ctx, grad_output):
        return None


class Sometimes(Forgets):
    @staticmethod
    def backward(ctx, grad_output):
        if grad_output.ndim:
            return 2 * grad_output


@row("C2")
def test_a_backward_that_forgets_to_return_is_warned_of_once():
    line = Forgets.backward.__code__.co_firstlineno
    with pytest.warns(UserWarning, match=rf"Forgets.backward returned nothing.*test_mistakes.py:{line}") as caught:
        assert jax.grad(Forgets.apply)(1.0) == 0.0
        assert jax.grad(Forgets.apply)(1.0) == 0.0
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for function in (Means, Sometimes):
            assert jax.grad(function.apply)(1.0) == 0.0


@row("A2")
def test_a_torch_tensor_is_refused():
    torch = pytest.importorskip("torch")
    for value in (torch.ones(2), {"deep": [torch.nn.Parameter(torch.ones(2))]}):
        with pytest.raises(TypeError, match=r"cube: input 0 \('x'\) is a torch tensor.*from_torch"):
            cube(value)


@row("D8")
def test_outputs_that_depend_on_the_flags_are_shown():
    @jaxfn.function
    def f(ctx, x):
        return (x, {"twice": 2 * x}) if any(ctx.needs_input_grad) else x

    f.backward(lambda ctx, g, *_: g)
    with pytest.raises(RuntimeError, match=r"f.forward returned tuple\(array, \{'twice': array\}\) .* and array when"):
        jax.grad(jax.jit(lambda x: jax.tree.leaves(f(x))[0]))(1.0)


def test_threads_that_meet_the_same_unknown_option(monkeypatch):
    """Both find that this XLA does not know it; neither fails."""
    monkeypatch.setattr(_compat, "_QUICK", [{"xla_no_such_option": True}, {}])
    lowered = [jax.jit(lambda x, k=k: x + k).lower(jnp.float32(0)) for k in range(4)]
    results, errors = [], []
    together = threading.Barrier(len(lowered))

    def compile_one(program):
        together.wait()
        try:
            results.append(float(_compat.compile_quickly(program)(jnp.float32(0))))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=compile_one, args=(program,)) for program in lowered]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    np.testing.assert_allclose(sorted(results), range(4))


@row("E2")
def test_an_eager_shard_map():
    """JAX cannot call a custom_vjp of this kind there, and nothing is differentiated."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")
    mapped = jax.shard_map(cube, mesh=mesh, in_specs=spec, out_specs=spec)
    np.testing.assert_allclose(mapped(jnp.full(2, 2.0)), np.full(2, 8.0))
