"""Contract rows B11, D4-D6 in detail: what `jvp` is passed, what it may return, and where forward mode comes from."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.custom_derivatives import linear_call

import jaxfn
from tests.support import cases
from tests.support.both_modes import CASES as IN_BOTH_MODES
from tests.support.cases import make_args, residual_bytes, with_attributes, with_rules
from tests.support.contexts import CONTEXTS, eager, jit
from tests.support.derivatives import check, derivative
from tests.support.marks import EXPERIMENTAL, cells, row

X = jnp.array([0.3, -1.2])
WRAPS = pytest.mark.parametrize("wrap", [eager, jit], ids=["eager", "jit"])


def function(forward: Any, jvp: Any = None, backward: Any = None) -> Any:
    return jaxfn.function(forward, backward, jvp=jvp)


def tangent_of(f: Any, *args: Any) -> Any:
    return jax.jvp(f, args, jax.tree.map(jnp.ones_like, args))[1]


@row("B9", "D4")
@WRAPS
@pytest.mark.parametrize("materialize", [True, False])
def test_the_tangents_that_jvp_gets(wrap, materialize):
    """One for each input; of static ones and integers None; of unperturbed ones zeros or None."""
    seen: list[Any] = []

    @jaxfn.function
    def f(ctx, x, pair, n, factor, *, option="a"):
        ctx.set_materialize_grads(materialize)
        return x + pair["a"] + pair["b"][0] + n + factor

    @f.jvp
    def _(ctx, *tangents):
        seen.append(jax.tree.map(lambda t: (str(t.dtype), t.shape), tangents))
        return tangents[1]["a"]

    inputs = X, np.arange(2, dtype=np.int32)

    def of_a(a):
        return f(inputs[0], {"a": a, "b": [jnp.ones((2, 1))[0], None]}, inputs[1], 2.5, option="b")

    np.testing.assert_array_equal(wrap(lambda a: tangent_of(of_a, a))(X), [1, 1])
    vector, one = ("float32", (2,)), ("float32", (1,))
    if materialize:
        assert seen == [(vector, {"a": vector, "b": [one, None]}, None, None, None)]
    else:
        assert seen == [(None, {"a": vector, "b": [None, None]}, None, None, None)]


@row("D4")
@WRAPS
def test_needs_input_grad_in_jvp(wrap):
    seen: list[Any] = []

    @jaxfn.function
    def f(ctx, x, w, factor):
        return x * w

    @f.jvp
    def _(ctx, of_x, of_w, of_factor):
        seen.append((tuple(ctx.needs_input_grad), ctx.num_inputs, ctx.num_outputs))
        return of_w

    wrap(lambda w: tangent_of(lambda w: f(X, w, 2), w))(X)
    assert seen == [((False, True, False), 3, 1)]


@row("D4")
@WRAPS
def test_None_returned_is_a_zero_tangent(wrap):
    """A symbolic one: a Function behind it is not asked for its derivative at all."""

    def unwanted(ctx, tangent):
        raise AssertionError("asked for the derivative of what has none")

    split = function(lambda ctx, x: (x * 2, {"a": x, "b": [x, 3]}), lambda ctx, t: (t * 5, {"a": None, "b": [t, None]}))
    nothing = function(lambda ctx, x: x * 2, lambda ctx, t: None)
    behind = function(lambda ctx, x: x * 1, unwanted)

    def f(x):
        first, rest = split(x)
        return first, rest["a"], rest["b"][0], nothing(x), behind(jax.lax.stop_gradient(nothing(x)))

    tangents = wrap(lambda x: tangent_of(f, x))(X)
    np.testing.assert_array_equal(tangents, [[5, 5], [0, 0], [1, 1], [0, 0], [0, 0]])


@row("B11")
@WRAPS
def test_what_jvp_reads(wrap):
    """saved_tensors is what save_for_forward saved, once it was called; attributes are equal for both."""
    seen: dict[str, Any] = {}

    @jaxfn.function
    def f(ctx, x, calls):
        ctx.save_for_backward(x, None, y=x * 3)
        if calls:
            ctx.save_for_forward(x * 7)
        if calls == 2:
            ctx.save_for_forward(None, x * 5)
        ctx.stored = {"array": x * 2, "text": "a"}
        return x * 1

    def log(name, ctx):
        stored = ctx.stored["text"], ctx.stored["array"]
        seen[name] = [ctx.saved_tensors, dict(ctx.saved_variables), stored]

    @f.jvp
    def _(ctx, tangent, _):
        log("jvp", ctx)
        return tangent

    @f.backward
    def _(ctx, grad_output):
        log("backward", ctx)
        return grad_output, None

    x = jnp.float32(1)
    for calls, expected in enumerate([[(1, None, 3), {"y": 3}], [(7,), {}], [(None, 5), {}]]):
        with jax.disable_jit():
            wrap(lambda x, calls=calls: tangent_of(lambda x: f(x, calls), x))(x)
            wrap(jax.grad(lambda x, calls=calls: f(x, calls)))(x)
        assert seen == {"jvp": [*expected, ("a", 2)], "backward": [(1, None, 3), {"y": 3}, ("a", 2)]}


@row("B11")
def test_save_for_forward_takes_arrays_only():
    f = function(lambda ctx, x: ctx.save_for_forward(x, [x]) or x)
    with pytest.raises(TypeError, match="save_for_forward .* argument 1 is of type list"):
        f(X)


@row("B4")
@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_a_jvp_rule_adds_nothing_to_what_is_saved(case):
    """Nor does generate_jvp_rule, whose derivative in reverse mode is equal."""
    args = make_args(case)
    for forward_mode in ({"jvp": staticmethod(lambda ctx, *tangents: None)}, {"generate_jvp_rule": True}):
        assert residual_bytes(with_attributes(case, forward_mode), args) == residual_bytes(case.hand_written, args)


@row("B4")
def test_only_what_backward_needs_and_jvp_needs_is_saved():
    f = function(
        lambda ctx, x: ctx.save_for_backward(x > 0) or jnp.maximum(x, 0),
        lambda ctx, t: ctx.saved_tensors[0] * t,
        lambda ctx, g: ctx.saved_tensors[0] * g,
    )
    assert residual_bytes(f, (jnp.ones(1000),)) == 1000
    also = function(
        lambda ctx, x: ctx.save_for_backward(x > 0) or ctx.save_for_forward(x < 0) or jnp.maximum(x, 0),
        lambda ctx, t: ~ctx.saved_tensors[0] * t,
        lambda ctx, g: ctx.saved_tensors[0] * g,
    )
    assert residual_bytes(jax.jit(also), (jnp.ones(1000),)) <= 2000


@row("C16", "D4")
@cells("wrap", [jit], [eager, jit])
def test_complex_tangents_are_equal_in_torch_and_jax(wrap):
    """While backward has torch's convention."""
    square = function(
        lambda ctx, z: ctx.save_for_backward(z) or z * z,
        lambda ctx, t: 2 * ctx.saved_tensors[0] * t,
        lambda ctx, g: 2 * jnp.conj(ctx.saved_tensors[0]) * g,
    )
    z, direction = jnp.array([1 + 2j, 0.5 - 1j]), jnp.array([0.3 - 1j, 2j])

    def loss(f):
        return lambda z: jnp.sum(jnp.sin(f(z)).real * 2 + f(z * 1j).imag)

    def all_of(f):
        return [
            jax.jvp(f, (z,), (direction,))[1],
            jax.jacfwd(f, holomorphic=True)(z),
            jax.grad(loss(f))(z),
            jax.jvp(jax.grad(loss(f)), (z,), (direction,))[1],
            jax.grad(lambda z: jax.jvp(loss(f), (z,), (direction,))[1])(z),
            jax.hessian(lambda x: loss(f)(x + 1j * x * x))(X),
        ]

    for ours, plain in zip(wrap(lambda: all_of(square))(), jax.jit(lambda: all_of(lambda z: z * z))(), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-5)


@row("C16", "D4")
def test_a_real_tangent_for_a_complex_output():
    f = function(lambda ctx, x: x + 1j * x, lambda ctx, t: t)
    tangent = jax.jvp(f, (X,), (X,))[1]
    assert tangent.dtype == jnp.complex64
    np.testing.assert_array_equal(tangent, X)


@row("D4")
@cells("wrap", [eager], [eager, jit])
def test_bfloat16(wrap):
    """A float32 tangent is cast to the output's type; both modes give the inputs' type."""
    f = function(
        lambda ctx, x: ctx.save_for_backward(x) or x * x,
        lambda ctx, t: 4.0 * ctx.saved_tensors[0].astype(jnp.float32) * t,
        lambda ctx, g: 6.0 * ctx.saved_tensors[0].astype(jnp.float32) * g,
    )
    x = X.astype(jnp.bfloat16)
    tangent, gradient = wrap(lambda x: tangent_of(f, x))(x), wrap(jax.grad(lambda x: f(x).sum()))(x)
    hessian = wrap(jax.hessian(lambda x: f(x).sum()))(x)
    assert tangent.dtype == gradient.dtype == hessian.dtype == jnp.bfloat16
    np.testing.assert_allclose(tangent.astype(jnp.float32), 4 * X, rtol=1e-2)
    np.testing.assert_allclose(gradient.astype(jnp.float32), 6 * X, rtol=1e-2)
    np.testing.assert_allclose(hessian.astype(jnp.float32), 6 * np.eye(2), rtol=1e-2)


@row("D4")
@WRAPS
def test_python_scalars_and_outputs_that_are_inputs(wrap):
    f = function(lambda ctx, x: (x, x * 2), lambda ctx, t: (3 * t, 4 * t), lambda ctx, g, h: 5 * g + 7 * h)
    assert wrap(lambda x: jax.jvp(f, (x,), (1.0,))[1])(2.0) == (3, 4)
    assert wrap(jax.grad(lambda x: sum(f(x))))(2.0) == 12


@row("D4")
def test_a_Function_inside_jvp_has_its_own_rules():
    inner = function(lambda ctx, x: x * 1, lambda ctx, t: 2 * t, lambda ctx, g: 3 * g)
    outer = function(
        lambda ctx, x: ctx.save_for_backward(x) or inner(x) ** 2,
        lambda ctx, t: inner(ctx.saved_tensors[0]) * t,
        lambda ctx, g: inner(ctx.saved_tensors[0]) * g,
    )
    for wrap in (lambda f: f, jax.jit):
        assert wrap(jax.grad(jax.grad(outer)))(1.5) == 3
        assert wrap(jax.jacfwd(jax.grad(outer)))(1.5) == 2
        assert wrap(jax.grad(jax.jacfwd(outer)))(1.5) == 3
        assert wrap(jax.jacfwd(jax.jacfwd(outer)))(1.5) == 2


@row("D4", "D5")
@pytest.mark.parametrize("mode", ["grad", "jvp", "grad of grad", "hessian"])
@pytest.mark.parametrize("inner", ["both", "generated", "jvp"])
@pytest.mark.parametrize("outer", ["generated", "jvp"])
def test_a_Function_inside_a_rule_that_JAX_transposes(outer, inner, mode):
    double = cases.with_rules(inner, lambda ctx, x: 2 * x, lambda ctx, g: 2 * g, lambda ctx, t: 2 * t)

    def rule(ctx, vector):
        return ctx.saved_tensors[0] * double(vector)

    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)
        return x * x

    f = cases.with_rules(outer, forward, rule, rule)
    check({mode: derivative(mode, f)(1.5)}, {mode: derivative(mode, lambda x: x * x)(1.5)})


@row("D4")
def test_jvp_on_a_subclass_and_added_later():
    class OnlyReverse(jaxfn.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad_output):
            return 3 * grad_output

    class Both(OnlyReverse):
        @staticmethod
        def jvp(ctx, tangent):
            return 2 * tangent

    with pytest.raises(TypeError, match="forward-mode"):
        tangent_of(OnlyReverse.apply, 1.0)
    assert tangent_of(Both.apply, 1.0) == 2
    assert jax.grad(Both.apply)(1.0) == 3
    OnlyReverse.jvp = Both.jvp
    assert tangent_of(OnlyReverse.apply, 1.0) == 2


@row("D5b")
def test_jvp_alone_gives_reverse_mode_of_only_some_inputs_too():
    case = next(case for case in IN_BOTH_MODES if case.name == "two_inputs")
    rows = jnp.stack([X, X + 1, X - 2])

    def gradients(f):
        return (
            jax.vmap(jax.grad(lambda x, w: f(x, w)[0].sum(), (0, 1)), (0, None))(rows, X),
            jax.grad(lambda w: jnp.sin(jax.vmap(f, (0, None))(rows, w)[0]).sum())(X),
            jax.grad(lambda x: f(x, X)[0].sum())(X),
        )

    check(gradients(lambda *args: (case.apply("jvp")(*args),)), gradients(case.reference(("forward",), "jvp")))


# --- rules that are not linear

NONLINEAR = {
    "clip": lambda g: jnp.clip(g, -1, 1),
    "norm with a branch": lambda g: jnp.where(jnp.linalg.norm(g) > 1, g / jnp.linalg.norm(g), g),
    "sign": jnp.sign,
    "round": jnp.round,
    "constant added": lambda g: g + 1,
    "constant subtracted": lambda g: 0.5 - g,
    "constant alone": jnp.ones_like,
    "where with a constant": lambda g: jnp.where(jnp.array([True, False]), g, 2.0),
    "relu": jax.nn.relu,
    "concatenate": lambda g: jnp.concatenate([g[:1], jnp.ones(1)]),
    "set": lambda g: g.at[0].set(3.0),
    "pad": lambda g: jnp.pad(g[:1], (0, 1), constant_values=2.0),
    "inside jit": jax.jit(lambda g: g + 1),
    "inside cond": lambda g: jax.lax.cond(True, lambda g: g + 1, lambda g: g, g),
    "inside scan": lambda g: jax.lax.scan(lambda c, _: (c + 1, None), g, None, length=2)[0],
    "inside fori_loop": lambda g: jax.lax.fori_loop(0, 2, lambda i, c: c + 1, g),
    "inside vmap": jax.vmap(lambda g: g + 1),
    "inside checkpoint": jax.checkpoint(lambda g: g + 1),
    "integers": lambda g: g.astype(jnp.int32).astype(jnp.float32),
    "absolute": jnp.abs,
    "sort": jnp.sort,
    "subtracted in place": lambda g: g.at[0].subtract(1.0),
    "subtracted from a constant": lambda g: X.at[0].subtract(g[0]),
    "multiplied into a constant": lambda g: X.at[0].mul(g[0]),
    "constant imaginary part": lambda g: (jax.lax.complex(g, X) * (1 + 1j)).real,
    "filled": lambda g: jnp.take(g, jnp.array([0, 7]), mode="fill", fill_value=1.0),
    "stacked with a constant": lambda g: jnp.stack([g[0], jnp.float32(2.0)]),
    "custom_jvp": lambda g: _plus_one(g),
    "another Function": with_rules("generated", lambda ctx, x: x + 1, lambda ctx, g: g, None),
    "product with itself": lambda g: g * g,
    "branch by the tangent": lambda g: jax.lax.cond(g[0] > 0, lambda g: 2 * g, lambda g: 3 * g, g),
    "carries that swap": lambda g: jax.lax.fori_loop(0, 2, lambda i, c: (c[1], c[0] * c[1]), (X * 0 + 1, g))[1],
    "divisor": lambda g: 1 / (2 + g),
}


@jax.custom_jvp
def _plus_one(g):
    return g + 1.0


_plus_one.defjvp(lambda primals, tangents: (_plus_one(*primals), *tangents))


class SquareForward(cases.Square):
    generate_jvp_rule = True


def with_a_jvp(rule: Any) -> Any:
    return function(lambda ctx, x: x * 2, lambda ctx, t: rule(t))


def with_a_generated_jvp(rule: Any) -> Any:
    f = function(lambda ctx, x: x * 2, backward=lambda ctx, g: rule(g))
    f.Function.generate_jvp_rule = True
    return f


@row("D5", "D5b")
@cells(
    "rule, context",
    [*((rule, "eager") for rule in NONLINEAR), ("norm with a branch", "vmap"), ("constant added", "vmap")],
    NONLINEAR,
    ["eager", "vmap"],
)
def test_a_nonlinear_rule_raises_in_the_other_mode(rule, context):
    """The rule holds in its own mode."""
    rule, around = NONLINEAR[rule], CONTEXTS[context]
    forward, reverse = around(with_a_jvp(rule)), around(with_a_generated_jvp(rule))
    np.testing.assert_allclose(jax.jvp(forward, (X,), (3 * X,))[1], rule(3 * X), rtol=1e-6)
    with pytest.raises(RuntimeError, match="jvp is not linear in its tangents, so reverse mode"):
        jax.grad(lambda x: forward(x).sum())(X)
    if context == "eager":  # the other elements of a batch have a cotangent of zero
        np.testing.assert_allclose(jax.vjp(reverse, X)[1](3 * X)[0], rule(3 * X), rtol=1e-6)
    with pytest.raises(RuntimeError, match="backward is not linear in its gradients, so generate_jvp_rule"):
        jax.jvp(reverse, (X,), (X,))


LINEAR = {
    "plus zero": lambda g: g + 0.0,
    "plus zeros": lambda g: g + jnp.zeros_like(g),
    "minus itself": lambda g: 2 * g - g,
    "masked": lambda g: jnp.where(jnp.array([True, False]), g, 0.0),
    "zeros": jnp.zeros_like,
    "none": lambda g: None,
    "placed": lambda g: jnp.zeros(2).at[1].add(g[0]),
    "set in zeros": lambda g: jnp.zeros(2).at[1].set(g[0]),
    "padded": lambda g: jnp.pad(g[1:], (1, 0)),
    "concatenated": lambda g: jnp.concatenate([g[1:], jnp.zeros(1)]),
    "reversed": lambda g: g[::-1],
    "cumulative": jnp.cumsum,
    "matrix": lambda g: jnp.array([[1.0, 2.0], [3.0, 4.0]]) @ g,
    "inside jit": jax.jit(lambda g: 3 * g),
    "inside cond": lambda g: jax.lax.cond(True, lambda g: 3 * g, lambda g: g, g),
    "inside scan": lambda g: jax.lax.scan(lambda c, _: (c * 2, None), g, None, length=2)[0],
    "inside checkpoint": jax.checkpoint(lambda g: 3 * g),
    "stacked": lambda g: jnp.stack([g, jnp.zeros(2)])[0],
    "mean": lambda g: jnp.full(2, 1.0) * g.mean(),
    "solved": lambda g: jax.scipy.linalg.solve_triangular(jnp.array([[2.0, 0.0], [1.0, 3.0]]), g, lower=True),
    "rounded type": lambda g: g.astype(jnp.bfloat16).astype(jnp.float32),
    "chosen": lambda g: jnp.select([X > 1, X > 0], [g, 2 * g], 0.0),
    "chosen by a literal": lambda g: jax.lax.select_n(True, jnp.zeros(2), g),
    "recurrent": lambda g: jax.lax.scan(lambda c, gx: (c * gx[1] + gx[0], c), jnp.float32(0), (g, X), reverse=True)[1],
    "derivative of a scan": lambda g: jax.vjp(
        lambda x: jax.lax.scan(lambda c, y: (jnp.tanh(c + y), c), jnp.zeros(()), x)[1], X
    )[1](g)[0],
    "multiplied in place": lambda g: g.at[0].multiply(X[1]),
    "taken": lambda g: jnp.take(g, jnp.array([1, 1])),
    "divided": lambda g: g / X,
    "complex": lambda g: (jax.lax.complex(g, 2 * g) * (1 + 1j)).real,
    "equations": lambda g: jnp.linalg.solve(jnp.array([[2.0, 1.0], [1.0, 3.0]]), g),
    "equations with another result": lambda g: jax.lax.custom_linear_solve(
        lambda x: X * x, g, *[lambda matvec, b: (b / X, jnp.float32(0))] * 2, has_aux=True
    )[0],
    "convolved": lambda g: jnp.convolve(g, X, mode="same"),
    "transformed": lambda g: jnp.fft.fft(g).real,
    "sorted by a constant": lambda g: g[jnp.argsort(X)],
    "forward mode of a Function": lambda g: jax.jvp(SquareForward.apply, (X,), (g,))[1],
    "derivative of a Function": lambda g: jax.vjp(cases.Square.apply, X)[1](g)[0],
    "maximum's derivative": lambda g: jax.vjp(jnp.max, X)[1](g[0])[0],
    "pooling's derivative": lambda g: jax.vjp(
        lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2,), (1,), "SAME"), X
    )[1](g)[0],
    "normalization's derivative": lambda g: jax.vjp(lambda x: x / jnp.sqrt((x * x).sum()), X)[1](g)[0],
    "softmax's derivative": lambda g: jax.vjp(jax.nn.log_softmax, X)[1](g)[0],
    "sort's derivative": lambda g: jax.vjp(jnp.sort, X)[1](g)[0],
}


@row("D5")
def test_what_is_linear_does_not_raise():
    """Forward mode is then the transposed matrix of reverse mode: all rules in one program for each mode."""
    left_out = {"inside checkpoint"} if EXPERIMENTAL else set()  # JAX_REMAT3 cannot transpose checkpoint
    functions = {name: with_a_generated_jvp(rule) for name, rule in LINEAR.items() if name not in left_out}

    def jacobians(of):
        found = {}
        for name, f in functions.items():
            try:
                found[name] = of(f)(X)
            except RuntimeError as error:
                error.add_note(f"The rule {name!r}.")
                raise
        return found

    forward, reverse = (jax.jit(lambda of=of: jacobians(of))() for of in (jax.jacfwd, jax.jacrev))
    for name in functions:
        np.testing.assert_allclose(forward[name], reverse[name], rtol=1e-2, err_msg=name)


@row("D5")
@pytest.mark.parametrize("rule", ["masked", "recurrent", "inside scan"])
def test_what_is_linear_does_not_raise_eagerly(rule):
    f = with_a_generated_jvp(LINEAR[rule])
    np.testing.assert_allclose(jax.jacfwd(f)(X), jax.jacrev(f)(X), rtol=1e-2)


@row("D5")
def test_what_is_said_to_be_linear_is_looked_into():
    def tangent(rule):
        f = with_a_generated_jvp(lambda g: linear_call(rule, lambda r, v: v * r, X, g))
        return jax.jvp(f, (X,), (2 * X,))[1]

    np.testing.assert_allclose(tangent(lambda r, v: v * r), 2 * X * X, rtol=1e-6)
    with pytest.raises(RuntimeError, match="backward is not linear in its gradients"):
        tangent(lambda r, v: v + r)


@row("D5")
def test_generate_jvp_rule_and_a_jvp():
    class Both(cases.Square):
        generate_jvp_rule = True

        @staticmethod
        def jvp(ctx, tangent):
            return tangent

    for call in (Both.apply, jax.grad(Both.apply), lambda x: tangent_of(Both.apply, x)):
        with pytest.raises(RuntimeError, match="Both has both generate_jvp_rule=True and its own jvp"):
            call(1.0)


# --- D6, C13: no rule for a mode


@row("C13", "D6")
@pytest.mark.parametrize("attributes", [{}, {"generate_jvp_rule": True}], ids=["", "generate_jvp_rule"])
def test_no_rule_at_all(attributes):
    f = type("Bare", (jaxfn.Function,), {"forward": staticmethod(lambda ctx, x: x * 2), **attributes}).apply
    assert f(2.0) == 4
    with pytest.raises(TypeError, match="forward-mode"):  # JAX's own message
        tangent_of(f, 1.0)
    with pytest.raises(NotImplementedError, match="Bare cannot be differentiated"):
        jax.grad(f)(1.0)


# --- What jvp may not return

TWO = lambda ctx, x: (x * 2, x * 3)  # noqa: E731
ONE = lambda ctx, x: x * 2  # noqa: E731


def marking(ctx, x):
    y = x * 3
    ctx.mark_non_differentiable(y)
    return x * 2, y


WRONG = {
    "too few": (TWO, lambda t: t, RuntimeError, "expected 2, one for each output of forward, got 1"),
    "too many": (ONE, lambda t: (t, t), RuntimeError, "expected 1, .* got 2"),
    "list for several": (TWO, lambda t: [t, t], RuntimeError, "expected 2, .* got 1"),
    "number": (ONE, lambda t: 1.0, TypeError, "a Python float as the tangent of output 0.*shape .2,."),
    "text": (TWO, lambda t: (t, "a"), TypeError, "a Python str as the tangent of output 1"),
    "key": (ONE, lambda t: jax.random.key(0), TypeError, "a random key as the tangent of output 0"),
    "integer output": (
        lambda ctx, x: (x, x.astype(int)), lambda t: (t, t), RuntimeError,
        "different than None for output 1, .*its dtype is int32",
    ),
    "marked output": (marking, lambda t: (t, t), RuntimeError, "None for output 1, .*marked so"),
    "Python output": (
        lambda ctx, x: (x, 3), lambda t: (t, t), RuntimeError, "None for output 1, .*the Python value 3",
    ),
    "Python value inside": (
        lambda ctx, x: {"a": x, "n": 3}, lambda t: {"a": t, "n": t}, RuntimeError, r"output 0\['n'\]",
    ),
    "missing leaf": (
        lambda ctx, x: {"a": x, "b": x}, lambda t: {"a": t}, RuntimeError,
        "output 0 .* structure: nothing was returned for .'b'.",
    ),
    "one for a tree": (lambda ctx, x: [x, x], lambda t: t, RuntimeError, "output 0 .* structure"),
    "unknown leaf": (
        lambda ctx, x: {"a": x}, lambda t: {"a": t, "z": t}, RuntimeError, "there is nothing at .'z'.",
    ),
    "shape": (ONE, lambda t: t[:1], RuntimeError, r"shape \(1,\) for output 0: .* shape \(2,\)"),
    "broadcast": (ONE, lambda t: t[None], RuntimeError, r"shape \(1, 2\) for output 0"),
    "scalar": (TWO, lambda t: (t, t.sum()), RuntimeError, r"shape \(\) for output 1"),
    "complex": (ONE, lambda t: t * 1j, TypeError, r"complex64\) for output 0, which is real \(float32\)"),
}  # fmt: skip


@row("D4")
@WRAPS
@pytest.mark.parametrize("what", WRONG)
def test_what_jvp_may_not_return(what, wrap):
    forward, returned, kind, message = WRONG[what]
    f = function(forward, lambda ctx, t: returned(t))
    f.Function.__name__ = "Wrong"
    with pytest.raises(kind, match=r"Wrong\.jvp returned .*" + message):
        wrap(lambda x: tangent_of(lambda x: [y for y in jax.tree.leaves(f(x)) if hasattr(y, "dtype")], x))(X)


@row("D4")
def test_structures_that_are_allowed():
    """None for a subtree; any mapping of the output's structure; a namedtuple for a tuple."""
    f = function(lambda ctx, x: ({"a": x, "b": [x, x]}, x), lambda ctx, t: ({"b": None, "a": t}, t * 2))
    first, second = tangent_of(f, X)
    np.testing.assert_array_equal(first["a"], [1, 1])
    np.testing.assert_array_equal(first["b"], np.zeros((2, 2)))
    np.testing.assert_array_equal(second, [2, 2])
    g = function(lambda ctx, x: (x, x), lambda ctx, t: cases.Pair(t, None))
    np.testing.assert_array_equal(tangent_of(g, X), [[1, 1], [0, 0]])
