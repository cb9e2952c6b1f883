"""The jaxpr of a call: custom derivatives of JAX with the Function's name; primitives of jaxfn where JAX has none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from jaxfn._compat import inner_jaxpr
from jaxfn._jaxpr import all_eqns
from jaxfn._primitives import linear_map_p, tie_p
from tests.support.marks import EXPERIMENTAL, row


def forward(ctx, x, y):
    z = jnp.sin(x * y)
    ctx.save_for_backward(x, y, z)
    return z * y


def backward(ctx, grad_output):
    x, y, z = ctx.saved_tensors
    return jnp.exp(x) * y * grad_output, jnp.tanh(z) * grad_output


def jvp(ctx, dx, dy):
    x, y, z = ctx.saved_tensors
    return jnp.cosh(x) * y * dx + jnp.sinh(z) * dy


def saving(ctx, x, y):
    ctx.z = jnp.sin(x)  # does not depend on y
    return x * y


def made(name, **members):
    return type(name, (jaxfn.Function,), {k: staticmethod(v) if callable(v) else v for k, v in members.items()})


Reverse = made("Reverse", forward=forward, backward=backward)
Forward = made("Forward", forward=forward, jvp=jvp)
Both = made("Both", forward=forward, backward=backward, jvp=jvp)
Generated = made("Generated", forward=forward, backward=backward, generate_jvp_rule=True)
Once = made("Once", forward=forward, backward=jaxfn.once_differentiable(backward))
Saving = made("Saving", forward=saving, backward=lambda ctx, grad_output: (grad_output, ctx.z))
Constant = made("Constant", forward=lambda ctx, x, y: jnp.cos(y), backward=lambda ctx, grad_output: (None, None))
PROGRAMS = {
    "call": lambda f: f,
    "jit(grad)": lambda f: jax.jit(jax.grad(f, (0, 1))),
    "grad(jit)": lambda f: jax.grad(jax.jit(f), (0, 1)),
    "grad(grad)": lambda f: jax.grad(jax.grad(f, 1)),
    "jvp": lambda f: lambda x, y: jax.jvp(f, (x, y), (x, y)),
    "vmap": lambda f: lambda x, y: jax.vmap(f, (0, None))(jnp.stack([x, y, x]), y),
}
CALLS = {Reverse: "custom_vjp_call", Both: "custom_jvp_call", Forward: "custom_jvp_call"}


def traced(function, program="call"):
    return jax.make_jaxpr(PROGRAMS[program](function.apply))(np.float32(2), np.float32(3)).jaxpr


def eqns_of(jaxpr):
    """Returns all eqns, also those inside JAX's experimental custom derivatives."""
    eqns = list(all_eqns(jaxpr))
    hidden = [inner_jaxpr(eqn).jaxpr for eqn in eqns if eqn.primitive.name == "call_hi_primitive"]
    return eqns + [eqn for jaxpr in hidden for eqn in eqns_of(jaxpr)]


def calls_of(function, jaxpr):
    kind = "call_hi_primitive" if EXPERIMENTAL else CALLS[function]
    return [e for e in all_eqns(jaxpr) if e.primitive.name == kind and f"name={function.__name__}\n" in str(e)]


@row("A8", "E1")
@pytest.mark.parametrize("function", CALLS)
def test_a_call_is_one_eqn_with_the_name_and_the_inputs_of_the_Function(function):
    jaxpr = traced(function)
    (eqn,) = calls_of(function, jaxpr)
    assert jaxpr.eqns == [eqn] and eqn.invars == jaxpr.invars and eqn.outvars == jaxpr.outvars
    names = [e.primitive.name for e in eqns_of(jaxpr)]
    assert names[-3:] == ["mul", "sin", "mul"]
    assert names.count("custom_vjp_call") == (0 if EXPERIMENTAL else 1)  # inside a custom_jvp too
    x, y = np.float32(2), np.float32(3)
    gradient = jax.grad(lambda x: jax.core.eval_jaxpr(jaxpr, (), x, y)[0])
    assert np.allclose(gradient(x), y * (np.cosh(x) if function is Forward else np.exp(x)))
    assert np.allclose(jax.grad(gradient)(x), y * (np.sinh(x) if function is Forward else np.exp(x)))


@row("B4", "D3")
@pytest.mark.parametrize("function, program", [(Reverse, "jit(grad)"), (Forward, "grad(jit)"), (Both, "grad(grad)")])
def test_a_gradient_has_one_call_which_returns_saved_intermediates_too(function, program):
    jaxpr = traced(function, program)
    (eqn,) = calls_of(function, jaxpr)
    assert len(eqn.outvars) == 2  # the output and z, and neither x nor y
    names = [e.primitive.name for e in eqns_of(jaxpr)]
    assert names.count("sin") == (2 if program == "grad(grad)" else 1)  # the derivative of z
    assert {"exp", "tanh", "cosh", "sinh"} & set(names) == (
        {"cosh", "sinh"} if function is Forward else {"exp", "tanh"}
    )


TABLE = [
    ("call", [Reverse, Both, Forward, Generated, Once], set()),
    ("jit(grad)", [Reverse, Both, Forward, Generated], set()),
    ("grad(grad)", [Reverse, Both, Forward, Generated], set()),
    ("jvp", [Reverse, Once], set()),
    ("jvp", [Both, Generated, Forward], {"linear_map"}),
    ("jit(grad)", [Once], {"guard"}),
    ("call", [Constant], {"tie"}),
    ("jit(grad)", [Saving], {"tie"}),
    ("vmap", [Reverse, Both, Forward, Once, Saving], set()),
    ("vmap", [Constant], {"tie"}),
]


@row("D4", "D5", "E1c")
@pytest.mark.parametrize("program, functions, expected", TABLE)
def test_primitives_of_jaxfn_are_only_where_JAX_has_none(program, functions, expected):
    for function in functions:
        eqns = eqns_of(traced(function, program))
        found = {eqn.primitive.name for eqn in eqns if eqn.primitive in (linear_map_p, tie_p)}
        assert found | {"guard" for eqn in eqns if "name=_guard\n" in str(eqn)} == expected, function
