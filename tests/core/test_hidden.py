"""Arrays that `forward` hides on ctx in closures and objects: right in an eager first derivative, else an error."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.support.cases import Holder
from tests.support.contexts import GRADIENTS, GRADIENTS_OF_PROGRAMS, SECOND_DERIVATIVES, program
from tests.support.marks import EXPERIMENTAL, cells, row

X = jnp.array([0.3, -1.2, 0.7], jnp.float32)


# How the slope is hidden, and how backward finds it again.
HIDING = {
    "closure": (lambda c: lambda g: g * c, lambda hidden, g: hidden(g)),
    "partial": (lambda c: functools.partial(jnp.multiply, c), lambda hidden, g: hidden(g)),
    "object": (lambda c: Holder([c]), lambda hidden, g: g * hidden.value[0]),
}
EVERY_KIND = pytest.mark.parametrize("kind", HIDING)
UNSUPPORTED = r"forward\.backward closes over a value[\s\S]* or inside a closure or an object on ctx"
EAGER = ("grad",) if EXPERIMENTAL else ("grad", "vmap of grad", "grad of vmap")  # JAX_CUSTOM_VJP3 stages under vmap
STAGED = [name for name in (*GRADIENTS, *GRADIENTS_OF_PROGRAMS) if name not in EAGER]


def hiding(kind):
    """sin, whose slope is hidden on ctx."""
    hide, find = HIDING[kind]

    def forward(ctx, x):
        ctx.hidden = hide(jnp.cos(x))
        return jnp.sin(x)

    return jaxfn.autograd_function(forward, lambda ctx, g: find(ctx.hidden, g))


@row("B6")
@pytest.mark.parametrize("name", EAGER)
@EVERY_KIND
def test_a_hidden_array_is_right_in_an_eager_first_derivative(kind, name):
    np.testing.assert_allclose(program(name)(hiding(kind))(X), jnp.cos(X), rtol=1e-6)


@row("B6")
@cells(
    "kind,name",
    [
        ("closure", "grad of jit"),
        ("partial", "grad of checkpoint"),
        ("object", "jit of grad"),
        ("partial", "grad of scan"),
        ("object", "grad of cond"),
        ("closure", "jit of grad of jit"),
    ],
    HIDING,
    STAGED,
)
def test_a_hidden_array_of_another_program_raises(kind, name):
    """JAX stages forward, and loses the array on the way to backward."""
    with pytest.raises(NotImplementedError, match=UNSUPPORTED):
        program(name)(hiding(kind))(X)


@row("B6")
@cells(
    "kind,name",
    [
        ("closure", "grad of grad"),
        ("object", "jit of grad of grad"),
        ("partial", "vmap of grad of grad"),
        ("closure", "grad of jit of grad"),
        ("object", "grad of checkpoint of grad"),
        ("object", "grad of vmap of grad"),
        ("closure", "grad of scan of grad"),
        ("partial", "grad of grad of jit"),
        ("partial", "grad of grad of checkpoint"),
        ("object", "grad of grad of vmap"),
        ("partial", "grad of grad of scan"),
        ("object", "grad of grad of cond"),
    ],
    HIDING,
    SECOND_DERIVATIVES,
)
def test_a_hidden_array_has_no_second_derivative(kind, name):
    # JAX's own error comes first under JAX_REMAT3.
    errors = (NotImplementedError, jax.errors.UnexpectedTracerError) if EXPERIMENTAL else NotImplementedError
    with pytest.raises(errors, match=None if EXPERIMENTAL else UNSUPPORTED):
        program(name)(hiding(kind))(X)


@row("B6")
def test_an_external_object_may_hold_traced_arrays():
    """The object is like a module that is passed to the Function, with parameters of an outer trace."""

    def forward(ctx, x, module):
        ctx.module = module
        return x * module.value

    f = jaxfn.autograd_function(forward, lambda ctx, g: (g * ctx.module.value, None))

    @jax.jit
    def gradient_by_x(x, w):
        module = Holder(w)
        return jax.grad(lambda x: jax.vmap(lambda c: f(c, module))(x).sum())(x)

    np.testing.assert_allclose(gradient_by_x(jnp.ones(2), 3.0), [3.0, 3.0])


@row("D3")
def test_an_array_hidden_next_to_a_ref_raises_where_it_could_be_differentiated_again():
    class WritesAndHides(jaxfn.Function):
        @staticmethod
        def forward(ctx, x, ref):
            slope = jnp.cos(x)
            ref[...] = slope
            ctx.pull = lambda g: g * slope
            return jnp.sin(x)

        @staticmethod
        def backward(ctx, grad_output):
            return ctx.pull(grad_output), None

    ref = jax.new_ref(jnp.zeros(()))
    np.testing.assert_allclose(jax.grad(WritesAndHides.apply)(0.5, ref), np.cos(0.5), rtol=1e-6)
    with pytest.raises(NotImplementedError, match="WritesAndHides"):
        jax.grad(jax.grad(WritesAndHides.apply))(0.5, ref)
