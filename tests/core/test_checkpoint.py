"""Rows D9 and E1b: `jax.checkpoint` of a Function saves as much as of a hand-written rule."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import jaxfn
from tests.support.cases import function_of, hand_written_of, on_host, residual_bytes
from tests.support.contexts import CONTEXTS, program
from tests.support.marks import EXPERIMENTAL, HIGH_PRIMITIVES, TRACES_ALWAYS, cells, row

X = np.linspace(-0.9, 1.1, 4, dtype=np.float32)


# The identity, on the host.
identity_on_host = jaxfn.autograd_function(
    lambda ctx, x: on_host(lambda x: 1 * x, x, x), lambda ctx, g: identity_on_host(g)
)


# A change of the gradient, and whether it is linear. If it is not, the second derivative under a checkpoint is JAX's.
RULES: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "linear": (lambda g: 2 * g, True),
    "selected": (lambda g: jnp.where(jnp.arange(g.size).reshape(g.shape) < 3, g, 0), True),
    "scaled in a loop": (lambda g: lax.scan(lambda c, s: (c * s, None), g, jnp.arange(1.0, 4.0))[0], True),
    "solve": (lambda g: jnp.linalg.solve(jnp.eye(g.size) * 2 + 1, g.ravel()).reshape(g.shape), True),
    "host": (lambda g: identity_on_host(3 * g), True),
    "clipped": (lambda g: jnp.clip(g, -0.5, 0.5), False),
    "affine": (lambda g: 2 * g + 1, False),
    "Function": (lambda g: squashed(g), False),
}


def of_output(args: Any, y: Any) -> tuple[Any, ...]:
    return (y,)


def pulled(change: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda saved, g: change(g) * (1 - saved[0] ** 2)


def tanh_with(change: Callable[[Any], Any], rules: str = "backward") -> Any:
    """tanh, which saves its output; the gradient is changed first, and the tangent is another one."""
    return function_of(rules, jnp.tanh, lambda saved, t: 7 * t, pulled(change), of_output)


squashed = tanh_with(lambda g: g)


def hand_written(change: Callable[[Any], Any]) -> Any:
    return hand_written_of(jnp.tanh, pulled(change), of_output)


def chain(f: Any, checkpoint: Callable[..., Any]) -> Any:
    """The input of f is not an argument of the checkpoint, so that saving it, or the output, shows."""
    return checkpoint(lambda x: jnp.sum(jnp.sin(f(jnp.sin(x) * 2))))


def second(loss: Any, x: Any) -> Any:
    return jax.grad(lambda x: jnp.sum(jnp.cos(jax.grad(loss)(x))))(x)


@row("D9", "E1b")
@cells(
    "rule,rules,context",
    [
        ("linear", "backward", "eager"),
        ("selected", "backward", "jit"),
        ("scaled in a loop", "backward", "eager"),
        ("solve", "generated", "jit"),
        ("host", "backward", "jit"),
        ("clipped", "backward", "eager"),
        ("affine", "generated", "eager"),
        ("Function", "both", "eager"),
    ],
)
def test_a_checkpoint_saves_nothing_and_computes_the_output_again(rule, rules, context):
    change, is_linear = RULES[rule]
    ours, theirs = map(CONTEXTS[context], (tanh_with(change, rules), hand_written(change)))
    nbytes = [residual_bytes(chain(f, jax.checkpoint), (jnp.ones(100),)) for f in (ours, theirs)]
    assert nbytes == [400, 400]
    for checkpoint in (lambda f: f, jax.checkpoint):
        expected = second(chain(theirs, checkpoint), X)
        np.testing.assert_allclose(second(chain(ours, checkpoint), X), expected, rtol=1e-4, atol=1e-6)
        if is_linear:
            np.testing.assert_allclose(expected, second(chain(theirs, lambda f: f), X), rtol=1e-4, atol=1e-6)


# --- names by checkpoint_name


def of_names(rules: str) -> Any:
    return function_of(
        rules,
        lambda x: checkpoint_name(jnp.sin(checkpoint_name(1 * x, "inside")), "output"),
        None,
        lambda saved, g: g * saved[0],
        lambda args, _: (checkpoint_name(jnp.cos(args[0]), "saved"),),
    )


named = jax.custom_vjp(jnp.sin)
named.defvjp(
    lambda x: (checkpoint_name(jnp.sin(x), "output"), checkpoint_name(jnp.cos(x), "saved")),
    lambda saved, g: (g * saved,),
)


@row("E1b")
@pytest.mark.xfail(EXPERIMENTAL, strict=False, reason="with JAX_CUSTOM_VJP3 the policies do not see these names")
@cells(
    "rules,names",
    [("backward", ("output", "saved")), ("generated", ("output",)), ("backward", ("saved",)), ("backward", ())],
)
def test_policies_see_the_names_of_outputs_and_of_saved_arrays(rules, names):
    policy = jax.checkpoint_policies.save_only_these_names(*names, "inside")

    def loss(f):
        return jax.checkpoint(lambda x: jnp.sum(jnp.sin(f(jnp.sin(x)))), policy=policy)

    ours, theirs = loss(of_names(rules)), loss(named)
    x = jnp.linspace(-1, 1, 100)
    nbytes = [residual_bytes(f, (x,)) for f in (ours, theirs)]
    assert nbytes == [400 * (1 + len(names))] * 2
    np.testing.assert_allclose(jax.grad(ours)(x), jax.grad(theirs)(x), rtol=1e-6)


# --- names of axes


def two_steps(f: Any) -> Any:
    return lambda x: lax.scan(lambda x, _: (f(x), None), x, None, length=2)[0]


def over_columns(f: Any) -> Any:
    return lambda x: jax.vmap(f, 1, 1)(jnp.stack([x, 2 * x], 1)).sum(1)


COLLECTIVE: dict[str, Callable[[Any], Any]] = {
    "sum": lambda g: lax.psum(g, "i"),
    "mean": lambda g: g - lax.psum(g, "i") / len(X),  # JAX does not bind the name for pmean in a bwd
    "moved": lambda g: lax.ppermute(g, "i", [(i, (i + 1) % len(X)) for i in range(len(X))]),
    "index": lambda g: g * lax.axis_index("i"),
    "clipped sum": lambda g: jnp.clip(lax.psum(g, "i"), -0.5, 0.5),
    "largest": lambda g: g + 0.1 * lax.pmax(lax.stop_gradient(g), "i"),
}


def check(name: str, change: Callable[[Any], Any], token_bytes: tuple[int, ...] = (), **steps: Any) -> None:
    """Compares the second derivative of a program of tanh, and what it saves, with those of a hand-written rule."""
    ours, theirs = tanh_with(change), hand_written(change)
    for checkpoint in (lambda f: f, jax.checkpoint):

        def loss(f, checkpoint=checkpoint):
            mapped = program(name, scan=two_steps, checkpoint=checkpoint, **steps)(f)
            return lambda x: jnp.sum(jnp.sin(mapped(x)))

        np.testing.assert_allclose(second(loss(ours), X), second(loss(theirs), X), rtol=1e-4, atol=1e-5)
        nbytes = [residual_bytes(loss(f), (X,)) for f in (ours, theirs)]
        assert nbytes[0] - nbytes[1] in (0, *token_bytes)


@row("D9", "E1", "E1b")
@cells(
    "name,rule",
    [
        ("checkpoint of vmap", "sum"),
        ("vmap of checkpoint", "clipped sum"),
        ("checkpoint of jit of vmap", "moved"),
        ("vmap of scan of checkpoint", "mean"),
        ("vmap of checkpoint of scan", "largest"),
        ("vmap over columns of checkpoint of vmap", "index"),
    ],
)
def test_rules_that_use_the_name_of_a_vmapped_axis(name, rule):
    check(name, COLLECTIVE[rule], **{"vmap": partial(jax.vmap, axis_name="i"), "vmap over columns": over_columns})


@row("D9", "E1b", "E2")
@cells(
    "name,rule,check_vma",
    [
        ("checkpoint of shard_map", "sum", True),
        ("shard_map of checkpoint", "moved", False),
        ("shard_map of checkpoint", "clipped", True),
        ("shard_map of checkpoint of scan", "index", False),
        ("shard_map of checkpoint of scan", "largest", True),
        ("shard_map of scan of checkpoint", "clipped sum", False),
        ("shard_map of scan of checkpoint", "mean", True),
    ],
)
@HIGH_PRIMITIVES
def test_rules_that_use_the_name_of_a_mesh_axis(name, rule, check_vma):
    change = COLLECTIVE[rule] if rule in COLLECTIVE else RULES[rule][0]
    mesh = jax.make_mesh((len(X),), ("i",), axis_types=(jax.sharding.AxisType.Auto,))

    def shard_map(f):
        return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=check_vma))

    def varying(g):
        """The sum is equal on all devices, and the gradient of a varying array varies."""
        changed = change(g)
        varies = not check_vma or "i" in jax.typeof(changed).manual_axis_type.varying
        return changed if varies else lax.pcast(changed, "i", to="varying")

    with jax.set_mesh(mesh):
        token_bytes = (4, 4 * len(X))  # one number, or one on each device
        check(name, varying, token_bytes, shard_map=shard_map)


@row("E2")
@HIGH_PRIMITIVES
def test_a_derivative_of_what_an_eager_shard_map_stages_raises():
    """JAX takes no `custom_vjp` with symbolic zeros there, and `ctx.needs_input_grad` needs them."""
    mesh = jax.make_mesh((len(X),), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(jax.checkpoint(tanh_with(lambda g: g)), mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(jax.grad(lambda x: jax.jit(mapped)(x).sum())(X), 1 - np.tanh(X) ** 2, rtol=1e-5)
        with pytest.raises(NotImplementedError, match="symbolic_zeros"):
            jax.grad(lambda x: mapped(x).sum())(X)


# --- other effects of backward


@row("D9", "L1")
@TRACES_ALWAYS
def test_a_backward_that_raises_says_so_itself():
    @jaxfn.function
    def exp(ctx, x, w):
        y = jnp.exp(x) * w
        ctx.save_for_backward(y)
        return y

    @exp.backward
    def _(ctx, g):
        (y,) = ctx.saved_tensors
        if ctx.needs_input_grad.w:
            raise ValueError("there is no derivative by w")
        return g * y, None

    loss = jax.checkpoint(lambda x, w: jnp.sum(jnp.sin(exp(jnp.sin(x), w))))
    plain = jax.grad(lambda x: jnp.sum(jnp.sin(jnp.exp(jnp.sin(x)) * 2.0)))(X)
    np.testing.assert_allclose(jax.grad(loss)(X, 2.0), plain, rtol=1e-5)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(X, 2.0), plain, rtol=1e-5)
    with pytest.raises(ValueError, match="there is no derivative by w"):
        jax.grad(loss, 1)(X, 2.0)


@row("B4", "D9", "E1b")
def test_keys_integers_and_packed_arrays_among_the_residuals():
    @jaxfn.function
    def dropped(ctx, x, key, n):
        mask = jax.random.bernoulli(key, 0.5, x.shape)
        y = jnp.exp(x) * mask
        ctx.save_for_backward(y, jax.random.fold_in(key, 0), n)
        ctx.more = (mask, key)
        return y

    @dropped.backward
    def _(ctx, g):
        y, _, n = ctx.saved_tensors
        mask, key = ctx.more
        again = jax.random.bernoulli(key, 0.5, mask.shape)
        return jnp.where(again, g * y, 0) * n, None, None

    key, n = jax.random.key(0), jnp.int32(3)

    def loss(checkpoint):
        return checkpoint(lambda x: jnp.sum(jnp.sin(dropped(jnp.sin(x), key, n))))

    x = jnp.linspace(0, 1, 100)
    with jaxfn.saved_tensors_hooks(lambda x: x, lambda x: x):
        np.testing.assert_allclose(jax.grad(loss(jax.checkpoint))(x), jax.grad(loss(lambda f: f))(x), rtol=1e-5)
    np.testing.assert_allclose(second(loss(jax.checkpoint), x), second(loss(lambda f: f), x), rtol=1e-4)
    assert residual_bytes(loss(jax.checkpoint), (x,)) <= 400 + 16
