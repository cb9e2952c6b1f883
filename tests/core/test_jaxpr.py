"""The toolkit for jaxprs, on both sides of what it replaces: JAX's own evaluation, and what is true eagerly."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jaxfn
from jaxfn._compat import eval_eqn, make_jaxpr
from jaxfn._jaxpr import (
    ArrayIdentity,
    eval_jaxpr_with,
    needed_eqns,
    open_jaxpr,
    same_program,
    shares_batch,
    subjaxprs,
    unchanged_operand,
)
from tests.support.marks import EXPERIMENTAL

X = jnp.arange(1.0, 4.0)


@jax.custom_jvp
def with_jvp(x):
    return x


with_jvp.defjvp(lambda primals, tangents: (primals[0], tangents[0]))


@jax.custom_vjp
def with_vjp(x, scale=1.0):
    return x


with_vjp.defvjp(lambda x, scale=1.0: (x, scale), lambda scale, g: (g * scale, None))


@jax.custom_batching.custom_vmap
def with_vmap(x):
    return jnp.sin(x)


@with_vmap.def_vmap
def _(axis_size, in_batched, x):
    return jnp.sin(x), in_batched[0]


@jaxfn.function
def identity(ctx, x):
    return x


@identity.backward
def _(ctx, grad_output):
    return grad_output


def scanned(x):
    return jax.lax.scan(lambda carry, y: (carry * x.sum() + y, carry + 1.0), 2.0, x, reverse=True)


def looped(x):
    return jax.lax.while_loop(lambda c: c[1] < x[2] * 9, lambda c: (c[0] + 1.0, c[1] * x[1]), (0.0, x[0]))


def solved(x):
    return jax.lax.custom_linear_solve(lambda y: 2 * x * y, x + 1, lambda _, b: b / (2 * x))


def on_devices(x):
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("i")
    return jax.shard_map(lambda x: x * 2, mesh=mesh, in_specs=spec, out_specs=spec)(jnp.stack([x, x]))


PROGRAMS = {
    "jit": (jax.jit(lambda x: (x.sum(), x + 1)), ["jit"]),
    "checkpoint": (jax.checkpoint(jnp.sin), ["call" if EXPERIMENTAL else "checkpoint"]),
    "custom_jvp": (with_jvp, ["call"]),
    "custom_vjp": (with_vjp, ["call"]),
    "custom_vmap": (with_vmap, ["call"]),
    "scan": (scanned, ["scan"]),
    "while": (looped, ["while", "while"]),
    "cond": (lambda x: jax.lax.cond(x[0] > 0, jnp.sin, lambda x: x * x[0], x), ["cond", "cond"]),
    "solve": (solved, ["call"]),
    "shard_map": (on_devices, ["shard_map"]),
}
EACH = pytest.mark.parametrize("name", PROGRAMS)


@EACH
def test_variables_of_subjaxprs_are_bound_to_those_of_the_eqn(name):
    """They are bound by their types; a part of an array has one axis less."""
    function, kinds = PROGRAMS[name]
    eqns = [eqn for eqn in make_jaxpr(function, X).jaxpr.eqns if subjaxprs(eqn)]
    assert [sub.kind for eqn in eqns for sub in subjaxprs(eqn) if sub.kind != "jit" or name == "jit"] == kinds
    for eqn in eqns:
        for sub in subjaxprs(eqn):
            pairs = [(v, eqn.invars[i]) for v, i in zip(sub.jaxpr.invars, sub.operands, strict=True)]
            results = zip(sub.jaxpr.outvars, sub.results, strict=True)
            pairs += [(v, eqn.outvars[i]) for v, i in results if i is not None]
            for inner, outer in pairs:
                is_part = sub.kind == "scan" and inner.aval.shape != outer.aval.shape
                assert inner.aval.dtype == outer.aval.dtype
                assert sub.kind == "shard_map" or inner.aval.shape == outer.aval.shape[is_part:]
            for output, invar in sub.carried:
                assert sub.jaxpr.outvars[output].aval.shape == sub.jaxpr.invars[invar].aval.shape
                assert invar >= sub.num_consts and sub.operands[invar] - sub.operands[sub.num_consts] == output


@EACH
def test_evaluation_by_eqns_is_that_of_the_function(name):
    function, _ = PROGRAMS[name]
    jaxpr, consts = open_jaxpr(jax.make_jaxpr(lambda x: function(2 * x))(X))
    indices = []

    def evaluate(index, eqn, operands):
        indices.append(index)
        return eval_eqn(eqn, operands)

    results = eval_jaxpr_with(evaluate, jaxpr, consts, [X])
    for actual, expected in zip(results, jax.tree.leaves(function(2 * X)), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6)
    assert indices == list(range(len(jaxpr.eqns)))


def dependence(function, *args):
    """Returns, for each output, the inputs that it depends on, and the operations between them."""
    jaxpr = make_jaxpr(function, *args).jaxpr
    found = []
    for output in jaxpr.outvars:
        eqns, variables = needed_eqns(jaxpr, [output])
        names = {eqn.primitive.name for eqn in eqns}
        found.append(({i for i, v in enumerate(jaxpr.invars) if v in variables}, names))
    return found


def printed(x):
    jax.debug.print("{}", x)
    return jnp.sin(x)


def test_what_outputs_depend_on():
    """Effects are left out."""
    assert dependence(lambda x, y: (jnp.sin(x), jnp.cos(jnp.sin(x)) * y, 2.0, y), 1.0, 2.0) == [
        ({0}, {"sin"}),
        ({0, 1}, {"sin", "cos", "mul"}),
        (set(), set()),
        ({1}, set()),
    ]
    assert dependence(printed, 1.0) == [({0}, {"sin"})]


def test_a_read_depends_on_what_was_written_before():
    def function(x, y, z):
        ref, other = jax.new_ref(x), jax.new_ref(y)
        ref[...] = jnp.exp(y)
        other[...] = z
        return ref[...]

    ((inputs, names),) = dependence(function, 1.0, 2.0, 3.0)
    assert inputs == {0, 1} and "exp" in names


@pytest.mark.skipif(EXPERIMENTAL, reason="JAX's experimental custom_vjp is lowered before")
def test_an_operand_for_the_rule_alone_is_not_a_dependence():
    assert dependence(lambda x, y: with_vjp(x, jnp.sin(y)), 1.0, 2.0) == [({0}, {"custom_vjp_call"})]


def is_input_when_staged(function):
    jaxpr = jax.make_jaxpr(function)(X).jaxpr
    producers = {v: (eqn, i) for eqn in jaxpr.eqns for i, v in enumerate(eqn.outvars)}
    (v,) = jaxpr.outvars
    while v in producers:
        eqn, i = producers[v]
        operand = unchanged_operand(eqn, i)
        if operand is None:
            return False
        v = eqn.invars[operand]
    return v is jaxpr.invars[0]


# In addition to those of `test_identity`.
NO_OPS = {
    "device_put of a pair": lambda x: jax.device_put((x + 1, x), (jax.devices()[1], None))[1],
    "checkpoint of no-ops": jax.checkpoint(lambda x: with_jvp(jax.lax.stop_gradient(x))),
    "custom_vjp with an operand more": lambda x: with_vjp(x, jnp.float32(2.0)),
    "a Function in checkpoint": jax.checkpoint(identity),
    "second of two results": jax.checkpoint(lambda x: (jnp.sin(x), x)),
    "several": lambda x: identity(jax.lax.stop_gradient(with_jvp(jax.device_put(x)))),
}
NEW = {
    "jit": jax.jit(lambda x: x),
    "device_put to a device": lambda x: jax.device_put(x, jax.devices()[1]),
    "device_put that copies": partial(jax.device_put, may_alias=False),
    "barrier": jax.lax.optimization_barrier,
    "checkpoint of a sum": jax.checkpoint(lambda x: x + 1),
    "copy": jnp.copy,
}


@pytest.mark.parametrize("name", NO_OPS)
def test_a_no_op_returns_an_operand_unchanged(name):
    def function(x):
        return jax.tree.leaves(NO_OPS[name](x))[-1]

    assert function(X) is X and is_input_when_staged(function)


@pytest.mark.parametrize("name", NEW)
def test_what_returns_a_new_array_returns_no_operand_unchanged(name):
    assert NEW[name](X) is not X and not is_input_when_staged(NEW[name])


def test_whether_two_programs_have_equal_operations_and_constants():
    def program(inner=jnp.sin, constant=np.nan, literal=2.0):
        array = np.array([0, constant, 1], np.float32)
        return make_jaxpr(lambda x: jax.jit(inner)(x) * array + literal, X)

    assert same_program(program(), program())
    for other in (program(inner=jnp.cos), program(constant=1), program(literal=3.0), make_jaxpr(jnp.sin, X)):
        assert not same_program(program(), other)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.vmap], ids=["eager", "jit", "vmap"])
def test_the_identity_of_arrays(wrap):
    def function(x):
        y, identity_of = x + 1, ArrayIdentity([x]).key
        assert identity_of(y) == identity_of(jax.lax.stop_gradient(y)) != identity_of(y + 0)
        assert identity_of(x) not in (identity_of(y), identity_of(x + 0))
        return y

    wrap(function)(X)


def test_what_has_the_batch_of_the_inputs():
    found = []

    def function(x, y):
        results = (x * y, x, jnp.zeros(()), with_vjp(x, y))
        found.append([shares_batch(result, [x, y]) for result in results])
        return x

    jax.jit(function)(1.0, 2.0)
    jax.vmap(function, in_axes=(0, None))(X, 2.0)
    jax.vmap(lambda x: jax.vmap(lambda y: function(x, y))(X))(X)
    assert found == [[True, False, False, False], [True, True, False, True], [True, False, False, False]]
