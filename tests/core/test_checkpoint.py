"""Rows D9 and E1b: `jax.checkpoint` of a Function saves as much as of a hand-written rule."""

from __future__ import annotations

from collections.abc import Callable
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
from tests.support.contexts import CONTEXTS
from tests.support.marks import EXPERIMENTAL, HIGH_PRIMITIVES, TRACES_ALWAYS, cells, row

X = np.linspace(-0.9, 1.1, 4, dtype=np.float32)


class OnHost(jaxfn.Function):
    """The identity, on the host."""

    @staticmethod
    def forward(ctx, x):
        return on_host(lambda x: 1 * x, x, x)

    @staticmethod
    def backward(ctx, g):
        return OnHost.apply(g)


# A change of the gradient, and whether it is linear. If it is not, the second derivative under a checkpoint is JAX's.
RULES: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "linear": (lambda g: 2 * g, True),
    "selected": (lambda g: jnp.where(jnp.arange(g.size).reshape(g.shape) < 3, g, 0), True),
    "scaled in a loop": (lambda g: lax.scan(lambda c, s: (c * s, None), g, jnp.arange(1.0, 4.0))[0], True),
    "solve": (lambda g: jnp.linalg.solve(jnp.eye(g.size) * 2 + 1, g.ravel()).reshape(g.shape), True),
    "host": (lambda g: OnHost.apply(3 * g), True),
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
    "rule,rules,program",
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
def test_a_checkpoint_saves_nothing_and_computes_the_output_again(rule, rules, program):
    change, is_linear = RULES[rule]
    ours, theirs = map(CONTEXTS[program], (tanh_with(change, rules), hand_written(change)))
    nbytes = [residual_bytes(chain(f, jax.checkpoint), (jnp.ones(100),)) for f in (ours, theirs)]
    assert nbytes == [400, 400]
    for checkpoint in (lambda f: f, jax.checkpoint):
        expected = second(chain(theirs, checkpoint), X)
        np.testing.assert_allclose(second(chain(ours, checkpoint), X), expected, rtol=1e-4, atol=1e-6)
        if is_linear:
            np.testing.assert_allclose(expected, second(chain(theirs, lambda f: f), X), rtol=1e-4, atol=1e-6)


# --- names by checkpoint_name


class Named(jaxfn.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(checkpoint_name(jnp.cos(x), "saved"))
        return checkpoint_name(jnp.sin(checkpoint_name(1 * x, "inside")), "output")

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0]


class NamedInBothModes(Named):
    generate_jvp_rule = True


named = jax.custom_vjp(jnp.sin)


def named_fwd(x):
    return checkpoint_name(jnp.sin(x), "output"), checkpoint_name(jnp.cos(x), "saved")


named.defvjp(named_fwd, lambda saved, g: (g * saved,))


@row("E1b")
@pytest.mark.xfail(EXPERIMENTAL, strict=False, reason="with JAX_CUSTOM_VJP3 the policies do not see these names")
@cells(
    "function,names", [(Named, ("output", "saved")), (NamedInBothModes, ("output",)), (Named, ("saved",)), (Named, ())]
)
def test_policies_see_the_names_of_outputs_and_of_saved_arrays(function, names):
    policy = jax.checkpoint_policies.save_only_these_names(*names, "inside")

    def loss(f):
        return jax.checkpoint(lambda x: jnp.sum(jnp.sin(f(jnp.sin(x)))), policy=policy)

    ours, theirs = loss(function.apply), loss(named)
    x = jnp.linspace(-1, 1, 100)
    nbytes = [residual_bytes(f, (x,)) for f in (ours, theirs)]
    assert nbytes == [400 * (1 + len(names))] * 2
    np.testing.assert_allclose(jax.grad(ours)(x), jax.grad(theirs)(x), rtol=1e-6)


# --- names of axes


NAMED: dict[str, Callable[..., Any]] = {
    "vmap in checkpoint": lambda f, c: c(jax.vmap(f, axis_name="i")),
    "checkpoint in vmap": lambda f, c: jax.vmap(c(f), axis_name="i"),
    "jit of vmap in checkpoint": lambda f, c: c(jax.jit(jax.vmap(f, axis_name="i"))),
    "scan in vmap": lambda f, c: jax.vmap(
        lambda x: lax.scan(lambda x, _: (c(f)(x), None), x, None, length=2)[0], axis_name="i"
    ),
    "checkpoint of scan in vmap": lambda f, c: jax.vmap(
        c(lambda x: lax.scan(lambda x, _: (f(x), None), x, None, length=2)[0]), axis_name="i"
    ),
    "two vmaps": lambda f, c: lambda x: jax.vmap(c(jax.vmap(f, axis_name="i")), 1, 1)(jnp.stack([x, 2 * x], 1)).sum(1),
}
COLLECTIVE: dict[str, Callable[[Any], Any]] = {
    "sum": lambda g: lax.psum(g, "i"),
    "mean": lambda g: g - lax.psum(g, "i") / len(X),  # JAX does not bind the name for pmean in a bwd
    "moved": lambda g: lax.ppermute(g, "i", [(i, (i + 1) % len(X)) for i in range(len(X))]),
    "index": lambda g: g * lax.axis_index("i"),
    "clipped sum": lambda g: jnp.clip(lax.psum(g, "i"), -0.5, 0.5),
    "largest": lambda g: g + 0.1 * lax.pmax(lax.stop_gradient(g), "i"),
}


def check(loss: Callable[..., Any], change: Callable[[Any], Any], token_bytes: tuple[int, ...] = ()) -> None:
    """Compares the second derivative of a loss of (tanh, a checkpoint), and what it saves, with hand-written ones."""
    ours, theirs = tanh_with(change), hand_written(change)
    for checkpoint in (lambda f: f, jax.checkpoint):
        expected = second(loss(theirs, checkpoint), X)
        np.testing.assert_allclose(second(loss(ours, checkpoint), X), expected, rtol=1e-4, atol=1e-5)
        nbytes = [residual_bytes(loss(f, checkpoint), (X,)) for f in (ours, theirs)]
        assert nbytes[0] - nbytes[1] in (0, *token_bytes)


@row("D9", "E1", "E1b")
@cells(
    "program,rule",
    [
        ("vmap in checkpoint", "sum"),
        ("checkpoint in vmap", "clipped sum"),
        ("jit of vmap in checkpoint", "moved"),
        ("scan in vmap", "mean"),
        ("checkpoint of scan in vmap", "largest"),
        ("two vmaps", "index"),
    ],
    NAMED,
    COLLECTIVE,
)
def test_rules_that_use_the_name_of_a_vmapped_axis(program, rule):
    def loss(f, c):
        mapped = NAMED[program](f, c)
        return lambda x: jnp.sum(jnp.sin(mapped(x)))

    check(loss, COLLECTIVE[rule])


SHARDED: dict[str, Callable[..., Any]] = {
    "shard_map in checkpoint": lambda f, c, s: c(s(f)),
    "checkpoint in shard_map": lambda f, c, s: s(c(f)),
    "checkpoint of scan in shard_map": lambda f, c, s: s(
        c(lambda x: lax.scan(lambda x, _: (f(x), None), x, None, length=2)[0])
    ),
    "scan in shard_map": lambda f, c, s: s(lambda x: lax.scan(lambda x, _: (c(f)(x), None), x, None, length=2)[0]),
}


@row("D9", "E1b", "E2")
@cells(
    "program,rule,check_vma",
    [
        ("shard_map in checkpoint", "sum", True),
        ("checkpoint in shard_map", "moved", False),
        ("checkpoint in shard_map", "clipped", True),
        ("checkpoint of scan in shard_map", "index", False),
        ("checkpoint of scan in shard_map", "largest", True),
        ("scan in shard_map", "clipped sum", False),
        ("scan in shard_map", "mean", True),
    ],
    SHARDED,
    [*COLLECTIVE, "linear", "clipped"],
    [True, False],
)
@HIGH_PRIMITIVES
def test_rules_that_use_the_name_of_a_mesh_axis(program, rule, check_vma):
    change = COLLECTIVE[rule] if rule in COLLECTIVE else RULES[rule][0]
    mesh = jax.make_mesh((len(X),), ("i",), axis_types=(jax.sharding.AxisType.Auto,))

    def sharded(f):
        return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=check_vma))

    def varying(g):
        """The sum is equal on all devices, and the gradient of a varying array varies."""
        changed = change(g)
        varies = not check_vma or "i" in jax.typeof(changed).manual_axis_type.varying
        return changed if varies else lax.pcast(changed, "i", to="varying")

    def loss(f, c):
        mapped = SHARDED[program](f, c, sharded)
        return lambda x: jnp.sum(jnp.sin(mapped(x)))

    with jax.set_mesh(mesh):
        check(loss, varying, token_bytes=(4, 4 * len(X)))  # one number, or one on each device


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
