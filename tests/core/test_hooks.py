"""Contract rows F1-F3: what happens to what was saved between forward and backward."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxfn
from tests.support.cases import CASES, Square, host_memory_is_apart, loss_of, make_args, residual_bytes
from tests.support.contexts import CONTEXTS, eager, jit
from tests.support.marks import cells, row

X = jnp.linspace(-1.0, 1.5, 1000)
EVERYTHING = jax.checkpoint_policies.everything_saveable
WRAPS = pytest.mark.parametrize("wrap", [eager, jit], ids=["eager", "jit"])


@jaxfn.function
def cube(ctx, x):
    """Saves an input and an intermediate for backward, an attribute as well, and something else for jvp."""
    ctx.save_for_backward(x, square=x * x)
    ctx.save_for_forward(x * x * 3)
    ctx.stored = x + 1
    return x**3


@cube.backward
def _(ctx, grad_output):
    x, square = ctx.saved_tensors
    return grad_output * (x * x + 2 * square) + 0 * ctx.stored


cube.jvp(lambda ctx, tangent: ctx.saved_tensors[0] * tangent + 0 * ctx.stored)


class SquareBoth(Square):
    """Adds forward mode to `Square`."""

    generate_jvp_rule = True


BOTH = pytest.mark.parametrize("function", [Square, SquareBoth], ids=["reverse", "both_modes"])


class Log:
    """Hooks that write down what they get."""

    def __init__(self) -> None:
        self.packed: list[Any] = []
        self.unpacked: list[Any] = []

    def pack(self, x: Any) -> Any:
        self.packed.append((x.shape, str(x.dtype)))
        return x

    def unpack(self, x: Any) -> Any:
        self.unpacked.append((x.shape, str(x.dtype)))
        return x

    def __enter__(self) -> Log:
        self.block = jaxfn.saved_tensors_hooks(self.pack, self.unpack)
        self.block.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.block.__exit__(*error)


def to_bfloat16(x: Any) -> Any:
    return x.astype(jnp.bfloat16)


def to_float32(x: Any) -> Any:
    return x.astype(jnp.float32)


def to_int8(x: Any) -> Any:
    scale = jnp.max(jnp.abs(x)) / 127
    return jnp.round(x / scale).astype(jnp.int8), scale


def from_int8(packed: Any) -> Any:
    codes, scale = packed
    return codes.astype(jnp.float32) * scale


def bfloat16() -> Any:
    return jaxfn.saved_tensors_hooks(to_bfloat16, to_float32)


def int8() -> Any:
    return jaxfn.saved_tensors_hooks(to_int8, from_int8)


def rounded(x: Any) -> Any:
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def total(f: Any) -> Any:
    return lambda *args: f(*args).sum()


# --- what passes the hooks


@row("F1")
@WRAPS
def test_every_saved_array_once(wrap):
    one = ((1000,), "float32")
    with Log() as log:
        gradient = wrap(jax.grad(total(cube)))(X)
    np.testing.assert_allclose(gradient, 3 * X**2, rtol=1e-5)
    assert log.packed == log.unpacked == [one, one]  # the input and the square; neither attribute nor for jvp


@row("F1")
@WRAPS
def test_nothing_without_differentiation(wrap):
    with Log() as log:
        wrap(cube)(X)
        wrap(jax.vmap(cube))(X)
        wrap(jax.grad(lambda x: Square.apply(jnp.ones(3)).sum() * x))(2.0)
    assert log.packed == log.unpacked == []


@row("F1")
@WRAPS
def test_forward_mode_reads_what_is_not_packed(wrap):
    with jaxfn.saved_tensors_hooks(lambda x: x * 0, lambda x: x):
        tangent = wrap(lambda x: jax.jvp(cube, (x,), (jnp.ones_like(x),))[1])(X)
    np.testing.assert_allclose(tangent, 3 * X**2, rtol=1e-5)


@row("F1")
@WRAPS
def test_one_array_saved_twice_None_and_integers(wrap):
    @jaxfn.function
    def f(ctx, x, n):
        ctx.save_for_backward(x, None, n, x, again=x, text="a")
        return x * n

    @f.backward
    def _(ctx, grad_output):
        _, nothing, n, again, by_name = ctx.saved_tensors
        assert nothing is None and ctx.saved_variables.text == "a" and by_name is again
        return grad_output * n, None

    with Log() as log:
        gradient = wrap(jax.grad(f))(2.0, jnp.int32(3))
    assert gradient == 3
    assert log.packed == log.unpacked == [((), "float32"), ((), "int32")]


@row("F1")
@WRAPS
def test_an_attribute_that_is_also_saved_is_stored_twice(wrap):
    """Once packed, for saved_tensors, and once as it is."""

    @jaxfn.function
    def f(ctx, x):
        ctx.save_for_backward(x)
        ctx.x = x
        return x * 1

    f.backward(lambda ctx, g: g * (100 * ctx.saved_tensors[0] + ctx.x))
    with jaxfn.saved_tensors_hooks(lambda x: x * 2, lambda x: x):
        assert wrap(jax.grad(f))(1.0) == 201


@row("F1")
@WRAPS
@BOTH
def test_what_unpack_returns_is_what_backward_reads(wrap, function):
    with jaxfn.saved_tensors_hooks(lambda x: {"a": x, "b": [x * 10, "text"]}, lambda p: p["a"] + p["b"][0]):
        assert wrap(jax.grad(function.apply))(jnp.float32(1)) == 22


@row("A3", "C1", "F1")
@BOTH
def test_hooks_and_backward_get_arrays_where_the_argument_was_a_python_number(function):
    seen = []

    class Seen(function):
        @staticmethod
        def backward(ctx, grad_output):
            seen.append(isinstance(ctx.saved_tensors[0], jax.Array))
            return function.backward(ctx, grad_output)

    with Log() as log:
        assert jax.vjp(Seen.apply, 3.0)[1](1.0) == (6,)
    assert log.packed == log.unpacked == [((), "float32")]
    assert seen == [True]


class Opaque:
    def __init__(self, value):
        self.value = value


@row("F1")
@pytest.mark.parametrize(
    ("pack", "unpack", "kind"),
    [
        (np.asarray, lambda array: array, jax.Array),  # which JAX makes of it
        (Opaque, lambda opaque: np.float32(opaque.value), Opaque),
        (float, jnp.float32, float),
        (str, lambda text: jnp.float32(float(text)), str),
    ],
    ids=["NumPy", "object", "number", "text"],
)
def test_pack_may_return_any_object_eagerly(pack, unpack, kind):
    seen = []
    with jaxfn.saved_tensors_hooks(pack, lambda packed: seen.append(packed) or unpack(packed)):
        _, pullback = jax.vjp(Square.apply, jnp.float32(3))
        assert pullback(jnp.float32(1)) == (6,)
    assert len(seen) == 1 and isinstance(seen[0], kind)


@row("F1")
@WRAPS
def test_unpack_must_return_an_array(wrap):
    hooks, message = jaxfn.saved_tensors_hooks(lambda x: x, lambda x: None), "Square: the unpack_hook .* a NoneType"
    with hooks, pytest.raises(TypeError, match=message):
        wrap(jax.grad(Square.apply))(1.0)


@row("F1")
@WRAPS
def test_an_error_in_a_hook_comes_through(wrap):
    def fail(x):
        raise ZeroDivisionError("mine")

    with jaxfn.saved_tensors_hooks(fail, lambda x: x), pytest.raises(ZeroDivisionError, match="mine"):
        wrap(jax.grad(Square.apply))(1.0)
    assert jax.grad(Square.apply)(1.0) == 2


# --- bytes


@row("F1")
@cells(
    "function, context, hooks, size",
    [
        (Square, "eager", bfloat16, 2000),
        (SquareBoth, "jit", bfloat16, 2000),
        (Square, "jit", int8, 1004),
        (SquareBoth, "eager", int8, 1004),
    ],
)
def test_packed_residuals_take_less_memory(function, context, hooks, size):
    """Packs as bfloat16, and as int8 with a scale."""
    f = total(CONTEXTS[context](function.apply))
    assert residual_bytes(f, (X,)) == 4000
    with hooks():
        assert residual_bytes(f, (X,)) == size
        gradient = jax.grad(f)(X)
    if hooks is bfloat16:
        np.testing.assert_array_equal(gradient, 2 * rounded(X))
    else:
        np.testing.assert_allclose(gradient, 2 * X, atol=2 * 1.5 / 127)
        assert np.unique(gradient).size < 256


@row("F1")
@BOTH
def test_bytes_of_a_scan_under_jit(function):
    """The residuals that scan saves for every step, counted by JAX and by the compiled executable."""

    def loss(x):
        return jax.lax.scan(lambda c, _: (function.apply(c) + 1, None), x, None, length=64)[0].sum()

    def measured():
        compiled = jax.jit(jax.grad(loss)).lower(X).compile()
        return residual_bytes(jax.jit(loss), (X,)), compiled.memory_analysis().temp_size_in_bytes

    stored, temporary = measured()
    with bfloat16():
        assert measured()[0] == stored / 2 == 64 * 2000
    with jaxfn.saved_tensors_hooks(lambda x: (x * 100).astype(jnp.int8), lambda x: x.astype(jnp.float32) / 100):
        stored_int8, temporary_int8 = measured()
    assert stored_int8 == stored / 4 == 64 * 1000
    assert temporary - temporary_int8 > 0.9 * 64 * 3000


@row("F1")
@pytest.mark.parametrize(
    "case", [c for c in CASES if c.name in ("square", "exp", "swish", "linear", "rotate")], ids=str
)
def test_right_to_rounding_for_every_kind_of_save(case):
    args = make_args(case)
    argnums = tuple(range(len(args)))
    plain = jax.grad(loss_of(case.reference), argnums)(*args)
    with bfloat16():
        ours = jax.jit(jax.grad(loss_of(case.apply), argnums))(*args)
        assert residual_bytes(case.apply, args) <= residual_bytes(case.hand_written, args) / 2 + 4
    for a, b in zip(ours, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=3e-2, atol=3e-2)


# --- where hooks are active


@row("F1")
@WRAPS
def test_the_innermost_apply(wrap):
    with Log() as outer:
        with Log() as inner:
            wrap(jax.grad(Square.apply))(1.0)
        assert (len(outer.packed), len(inner.packed)) == (0, 1)
        wrap(jax.grad(Square.apply))(2.0)
    assert (len(outer.packed), len(inner.packed)) == (1, 1)
    wrap(jax.grad(Square.apply))(3.0)
    assert (len(outer.packed), len(inner.packed)) == (1, 1)


@row("F1")
def test_as_a_decorator():
    log = Log()

    @jaxfn.saved_tensors_hooks(log.pack, log.unpack)
    def f(x):
        return Square.apply(x)

    assert [jax.grad(f)(3.0), jax.grad(f)(4.0)] == [6, 8]
    assert len(log.packed) == len(log.unpacked) == 2
    assert jax.grad(Square.apply)(3.0) == jax.grad(jaxfn.save_on_host()(lambda x: Square.apply(x)))(3.0) == 6
    assert len(log.packed) == 2


@row("F1")
def test_a_block_that_was_left_by_an_error():
    with pytest.raises(KeyError), Log() as log:
        raise KeyError
    jax.grad(Square.apply)(1.0)
    assert log.packed == []


@row("F1")
@BOTH
def test_active_where_applied_and_not_where_differentiated(function):
    with Log() as log:
        _, pullback = jax.vjp(function.apply, jnp.float32(3))
    assert len(log.packed) == 1 and log.unpacked == []
    assert pullback(jnp.float32(1)) == (6,)
    assert len(log.unpacked) == 1
    _, pullback = jax.vjp(function.apply, jnp.float32(3))
    with log:
        assert pullback(jnp.float32(1)) == (6,)
    assert len(log.packed) == len(log.unpacked) == 1


@row("F1")
@BOTH
@pytest.mark.parametrize("context", ["eager", "jit", "checkpoint"])
def test_a_block_inside_the_differentiated_function(context, function):
    """JAX differentiates some of it after the block was left."""
    log = Log()

    def f(x):
        with log:
            y = function.apply(x)
        return function.apply(y)

    np.testing.assert_allclose(jax.grad(CONTEXTS[context](f))(jnp.float32(1.5)), 4 * 1.5**3, rtol=1e-6)
    assert len(log.packed) == len(log.unpacked) >= 1


@row("F1")
def test_each_thread_has_its_own_hooks():
    inside, done = threading.Event(), threading.Event()
    gradients = []

    def other():
        inside.wait()
        gradients.append(jax.grad(Square.apply)(1.0))
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with jaxfn.saved_tensors_hooks(lambda x: x * 10, lambda x: x):
        inside.set()
        done.wait()
        gradients.append(jax.grad(Square.apply)(1.0))
    thread.join()
    assert gradients == [2, 20]


# --- jit


@row("F1")
@BOTH
def test_a_jitted_function_is_traced_once_for_each_pair(function):
    traces = []

    @jax.jit
    def step(x):
        traces.append(1)
        return jax.grad(function.apply)(x)

    def ten(x):
        return x * 10

    def same(x):
        return x

    for _ in range(3):
        assert step(1.0) == 2
        with jaxfn.saved_tensors_hooks(ten, same):
            assert step(1.0) == 20
            with jaxfn.saved_tensors_hooks(same, same):
                assert step(1.0) == 2
        with jaxfn.save_on_host():
            assert step(1.0) == 2
    assert len(traces) == 4


@row("F1")
@BOTH
def test_grad_of_a_function_that_was_jitted_outside(function):
    inner = jax.jit(function.apply)
    assert jax.grad(inner)(1.0) == 2
    with jaxfn.saved_tensors_hooks(lambda x: x * 10, lambda x: x):
        assert jax.grad(inner)(1.0) == 20
    assert jax.grad(inner)(1.0) == 2


# --- transformations


@row("F1")
@BOTH
def test_under_vmap(function):
    """Each example's own array is packed: an int8 scale is the example's own."""
    rows = jnp.stack([X, 100 * X])
    with int8():
        mapped = jax.vmap(jax.grad(total(function.apply)))(rows)
        of_mapped = jax.grad(total(jax.vmap(function.apply)))(rows)
        one_by_one = jnp.stack([jax.grad(total(function.apply))(row) for row in rows])
    np.testing.assert_allclose(mapped, one_by_one, rtol=1e-5)
    np.testing.assert_allclose(of_mapped, one_by_one, rtol=1e-5)


@row("F1")
@BOTH
@pytest.mark.parametrize("context", ["scan", "cond", "vmap", "checkpoint", "checkpoint that saves everything"])
def test_in_every_context(context, function):
    saving = {"checkpoint that saves everything": partial(jax.checkpoint, policy=EVERYTHING)}
    with bfloat16():
        gradient = jax.grad(total((CONTEXTS | saving)[context](function.apply)))(X)
    np.testing.assert_array_equal(gradient, 2 * rounded(X))


@row("F1")
@cells("function, check_vma", [(Square, False), (SquareBoth, True)], [Square, SquareBoth], [False, True])
def test_under_shard_map(function, check_vma):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    f = jax.shard_map(function.apply, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=check_vma)
    with bfloat16():
        np.testing.assert_array_equal(jax.jit(jax.grad(total(f)))(X), 2 * rounded(X))


@row("F1")
@BOTH
@WRAPS
def test_second_derivatives(wrap, function):
    """They are right to rounding through bfloat16; through integers and another shape there is none."""

    def loss(x):
        return jnp.sin(function.apply(x)).sum()

    second = jax.grad(total(jax.grad(loss)))
    with bfloat16():
        ours = wrap(second)(X)
    np.testing.assert_allclose(ours, jax.grad(total(jax.grad(lambda x: jnp.sin(x * x).sum())))(X), atol=0.1)
    for hooks in (int8(), jaxfn.saved_tensors_hooks(lambda x: x[None], lambda x: x[0])):
        with hooks, pytest.raises(NotImplementedError, match="Square.*second derivative goes through an array"):
            wrap(second)(X)
    with int8():  # where nothing saved is differentiated there is no reason to raise
        assert jax.grad(lambda c: jax.grad(function.apply)(3.0) * c)(1.0) == pytest.approx(6, abs=0.05)


# --- F2


@row("F2")
@BOTH
@WRAPS
def test_residuals_are_in_host_memory(wrap, function):
    if not host_memory_is_apart():
        pytest.skip("this JAX (0.10.0) takes the CPU's memory for host memory already")
    f = wrap(function.apply)
    with jaxfn.save_on_host():
        _, pullback = jax.vjp(f, X)
    stored = [x for x in jax.tree.leaves(pullback) if x.size == 1000]
    assert [x.sharding.memory_kind for x in stored] == ["pinned_host"]
    (gradient,) = pullback(jnp.ones(1000))
    assert gradient.sharding.memory_kind == jax.devices()[0].default_memory().kind
    np.testing.assert_array_equal(gradient, 2 * X)


@row("F2")
@BOTH
def test_in_a_compiled_training_step(function):
    def loss(x):
        return jnp.sin(function.apply(function.apply(x))).sum()

    with jaxfn.save_on_host():
        compiled = jax.jit(jax.grad(loss)).lower(X).compile()
        np.testing.assert_allclose(compiled(X), jax.grad(lambda x: jnp.sin(x**4).sum())(X), rtol=1e-4, atol=1e-6)
        second = jax.jit(jax.grad(total(jax.grad(loss))))(X)
    np.testing.assert_allclose(
        second, jax.grad(total(jax.grad(lambda x: jnp.sin(x**4).sum())))(X), rtol=1e-3, atol=1e-3
    )


@row("F2")
def test_a_clear_error_where_there_is_no_host_memory(monkeypatch):
    class Memory:
        kind = "device"

    class Device:
        platform = "toy"

        def addressable_memories(self):
            return [Memory()]

        def default_memory(self):
            return Memory()

    monkeypatch.setattr(jax, "devices", lambda *_: [Device()])
    with pytest.raises(RuntimeError, match="toy backend has no host memory.*device"), jaxfn.save_on_host():
        pass


# --- F3


@row("F3")
def test_hooks_inside_raise_the_message_and_so_does_entering_it_inside_hooks():
    not_here, message = jaxfn.disable_saved_tensors_hooks("not here"), "^not here$"
    with not_here:
        assert jax.grad(Square.apply)(3.0) == 6
        for block in (bfloat16, jaxfn.save_on_host):
            with pytest.raises(RuntimeError, match=message), block():
                pass
    with bfloat16(), pytest.raises(RuntimeError, match=message), jaxfn.disable_saved_tensors_hooks("not here"):
        pass
    with bfloat16():
        pass  # nothing is left behind


@row("F3")
def test_nested_and_as_a_decorator():
    @jaxfn.disable_saved_tensors_hooks("outer")
    def f():
        with pytest.raises(RuntimeError, match="inner"), jaxfn.disable_saved_tensors_hooks("inner"), bfloat16():
            pass
        with pytest.raises(RuntimeError, match="outer"), bfloat16():
            pass

    f()
    f()


@row("F3")
def test_each_thread_may_disable_hooks_for_itself():
    entered = []

    def other():
        with bfloat16():
            entered.append(1)

    with jaxfn.disable_saved_tensors_hooks("not here"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert entered == [1]


# --- compared with torch


@row("F1", "F3")
def test_matches_torch():
    """Compares which hooks are called in what order, for what, with torch run live."""
    torch = pytest.importorskip("torch")

    def define(base):
        class Product(base):
            @staticmethod
            def forward(ctx, x, y):
                ctx.save_for_backward(x, None, y)
                return x * y

            @staticmethod
            def backward(ctx, grad_output):
                x, _, y = ctx.saved_tensors
                return grad_output * y, grad_output * x

        return Product.apply

    def events(f, hooks, disable, grad, number):
        seen: list[Any] = []

        def log(name):
            return hooks(
                lambda x: seen.append(("pack", name, float(x))) or x * 2,
                lambda x: seen.append(("unpack", name, float(x))) or x / 2,
            )

        def note(value):
            seen.append(float(value))

        def attempt(action):
            try:
                action()
            except RuntimeError as error:
                seen.append(str(error))

        def nested(x):
            with log("outer"):
                y = f(x, x * 3)
                with log("inner"):
                    y = f(y, x)
                return f(y, number(2.0))

        def entered():
            with log("a"):
                pass

        def disabled_inside():
            with log("a"), disable("message"):
                pass

        def disabled():
            with disable("message"):
                note(grad(lambda x: f(x, x))(number(3.0)))
                entered()

        with log("around"):
            note(grad(lambda x: f(x, number(5.0)))(number(3.0)))
        note(grad(nested)(number(2.0)))
        attempt(disabled)
        attempt(disabled_inside)
        attempt(entered)
        return seen

    def torch_grad(f):
        def gradient(x):
            x = x.requires_grad_()
            return torch.autograd.grad(f(x), x)[0]

        return gradient

    theirs = events(
        define(torch.autograd.Function),
        torch.autograd.graph.saved_tensors_hooks,
        torch.autograd.graph.disable_saved_tensors_hooks,
        torch_grad,
        lambda v: torch.tensor(v),
    )
    ours = events(
        define(jaxfn.Function), jaxfn.saved_tensors_hooks, jaxfn.disable_saved_tensors_hooks, jax.grad, jnp.float32
    )
    # torch's own operations (x * 3, and those of backward) pack nothing here that jaxfn's do not.
    assert [e for e in ours if not isinstance(e, tuple)] == [e for e in theirs if not isinstance(e, tuple)]
    assert sorted(map(str, ours)) == sorted(map(str, theirs))


@row("F1")
@pytest.mark.parametrize("name, hooks", [("pack_hook", (1, 2)), ("unpack_hook", (jnp.sin, None))])
def test_hooks_that_are_not_functions_raise_where_they_are_passed(name, hooks):
    with pytest.raises(TypeError, match=rf"^saved_tensors_hooks: {name} is of type \w+; expected a function"):
        jaxfn.saved_tensors_hooks(*hooks)
