"""Row H19: torch Functions that cannot be traced, run by torch on the host, compared with their traced twins."""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import jaxfn
from tests.support.marks import cells, row

torch = pytest.importorskip("torch")

from tests.support.libraries import gradient_of, of_arrays, output_saved  # noqa: E402
from tests.support.torch_code import function_of, rule  # noqa: E402
from tests.support.torch_functions import CASES  # noqa: E402

Base: Any = torch.autograd.Function


def read(*values: Any) -> None:
    """Reads values, which a trace does not have."""
    for x in values:
        if isinstance(x, torch.Tensor) and not bool(torch.isfinite(x).all()):
            raise ValueError("an infinite value")


def reading(function: Any, method: str = "forward") -> Any:
    """Returns a twin of a torch Function that cannot be traced."""

    @functools.wraps(getattr(function, method))
    def checked(*args: Any) -> Any:
        read(*args)
        return getattr(function, method)(*args)

    return type(function.__name__, (function,), {method: staticmethod(checked)})


def outside(x: Any, allocate: Any) -> Any:
    """Returns a copy of a tensor, in memory that is written to as compiled code does."""
    out = allocate(x)
    ctypes.memmove(out.untyped_storage().data_ptr(), x.untyped_storage().data_ptr(), x.element_size() * x.numel())
    return out


def host(function: Any) -> Any:
    return jaxfn.from_torch(function, fallback="callback").apply


Tanh = rule(torch.tanh, lambda g, y: g * (1 - y * y), output_saved, name="Tanh")
Cube = rule(lambda x: x**3, lambda g, x: 3 * x**2 * g, name="Cube")


class Dirty(Base):
    @staticmethod
    def forward(ctx, x):
        x.mul_(3)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g * 3


class SavedAndWritten(Base):
    """Saves its output, which is an input that it updated."""

    @staticmethod
    def forward(ctx, x):
        x.exp_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0]


class Halved(Base):
    """Has a `jvp` and a `vmap`, which are not called on the host."""

    generate_vmap_rule = False

    @staticmethod
    def forward(x):
        return x / 2

    setup_context = staticmethod(lambda ctx, inputs, output: None)
    backward = staticmethod(lambda ctx, g: g / 2)
    jvp = staticmethod(lambda ctx, t: t / 2)
    vmap = staticmethod(lambda info, in_dims, x: (Halved.apply(x), in_dims[0]))


def sine_twice(x):
    y = x.sin()
    return y, y


OWN = {
    "tanh": Tanh,
    "dirty": Dirty,
    "saved_and_written": SavedAndWritten,
    "jvp_and_vmap": Halved,
    "a view, with another gradient": rule(lambda x: x.view_as(x), lambda g, _: -0.7 * g),
    "one_tensor_twice": rule(sine_twice, lambda g, h, x: (g + h) * x.cos()),
}
SHARED = """
    LinearFunction LinearFunctionNoBias SeparateStyle Variadic PickLogits AppliesAnother relu mul mul_constant quantize
    normalize log_sum_exp returned_input lookup undefined_gradients
"""
X = np.linspace(-0.5, 0.4, 12).reshape(4, 3)
FUNCTIONS = {name: (function, (X,)) for name, function in OWN.items()} | {
    name: CASES[name][:2] for name in SHARED.split()
}
QUICK = """
    saved_and_written jvp_and_vmap one_tensor_twice LinearFunctionNoBias SeparateStyle PickLogits mul quantize
    returned_input undefined_gradients
"""


@row("H19")
@pytest.mark.filterwarnings("ignore:Dirty|SavedAndWritten:UserWarning")
@cells(
    "name, dtype",
    [*((name, "float32") for name in QUICK.split()), ("relu", "float64"), ("tanh", "bfloat16")],
    FUNCTIONS,
    ["float32", "float64", "bfloat16"],
)
def test_a_callback_equals_the_traced_function(name: str, dtype: str):
    """The first one of several outputs is not used in some calls."""
    function, args = FUNCTIONS[name]
    with jax.enable_x64(dtype == "float64"):
        for method in ["forward", "backward"] if name == "tanh" else ["forward"]:
            by_host, arrays = of_arrays(jaxfn.from_torch(reading(function, method), fallback="callback"), args)
            traced, _ = of_arrays(jaxfn.from_torch(function), args)
            arrays = [jnp.asarray(x, dtype if x.dtype.kind == "f" else None) for x in arrays]
            assert_equal_derivatives(by_host, traced, arrays, dtype)
            if name == "undefined_gradients":
                assert_equal_derivatives(lambda *xs: by_host(*xs)[1:], lambda *xs: traced(*xs)[1:], arrays, dtype)


def assert_equal_derivatives(by_host: Any, traced: Any, arrays: Any, dtype: str) -> None:
    def outputs_and_gradients(f: Any) -> Any:
        return lambda *xs: (f(*xs), gradient_of(f, arrays)(*xs))

    ours, theirs = outputs_and_gradients(by_host), jax.jit(outputs_and_gradients(traced))
    assert "pure_callback" in str(jax.make_jaxpr(ours)(*arrays))
    for run in (ours, jax.jit(ours)):
        assert_close(run(*arrays), theirs(*arrays), dtype)
    batches = [jnp.stack([x, x[::-1]] if x.ndim else [x, x], -1) for x in arrays]
    assert_close(*(jax.jit(jax.vmap(f, -1))(*batches) for f in (ours, theirs)), dtype)


def assert_close(results: Any, expected: Any, dtype: str) -> None:
    tolerance = 0.06 if dtype == "bfloat16" else 1e-5 if dtype == "float32" else 1e-12
    for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1, np.abs(b).max()))


@row("H19")
def test_complex_gradients():
    square = host(reading(rule(torch.square, lambda g, z: 2 * g * z.conj())))
    z = jnp.array([1 + 2j, -0.5 + 1j])
    for f in (square, jax.jit(square)):

        def first(f, z):
            return jax.grad(lambda z: jnp.real(f(f(z)) * (1 - 3j)).sum())(z)

        np.testing.assert_allclose(first(f, z), first(jnp.square, z), rtol=1e-5)


@row("H19")
def test_compiled_code_with_several_inputs_under_scan_and_checkpoint():
    compiled = rule(lambda x, w: outside(x * w, torch.empty_like), lambda g, x, w: (g * w, g * x))
    x, w = jnp.array([1.0, -2.0, 0.5]), jnp.array([0.3, 1.1, -0.9])
    apply = host(compiled)

    def run(f, x, w):
        def step(c, _):
            return jnp.sin(jax.checkpoint(f)(c, w)), None

        return jax.lax.scan(step, x, None, length=4)[0].sum()

    for argnums in (0, 1, (0, 1)):
        gradients = [jax.jit(jax.grad(lambda x, w, f=f: run(f, x, w), argnums))(x, w) for f in (apply, jnp.multiply)]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), *gradients)
    np.testing.assert_allclose(jax.grad(lambda x: apply(x, x).sum())(x), 2 * x)  # one array, passed twice
    xs = jnp.stack([x, 2 * x], axis=1)
    np.testing.assert_allclose(jax.vmap(apply, (1, None))(xs, w), xs.T * w)
    np.testing.assert_allclose(jax.jit(jax.vmap(apply, (None, 1), 1))(w, xs), xs * w[:, None])
    for shape in ((0, 2), ()):
        assert jax.jit(jax.grad(lambda x: apply(x, x).sum()))(jnp.ones(shape)).shape == shape


@row("H19")
@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_in_shard_map(check_vma: bool):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    apply, spec = host(reading(Tanh)), PartitionSpec

    def total(w, x):
        return jax.lax.psum((apply(x * w) ** 2).sum(), "data")

    sharded = jax.shard_map(total, mesh=mesh, in_specs=(spec(), spec("data")), out_specs=spec(), check_vma=check_vma)
    w, x = jnp.float32(1.5), jnp.arange(4.0)
    expected = jax.grad(lambda w: (jnp.tanh(x * w) ** 2).sum())(w)
    np.testing.assert_allclose(jax.jit(jax.grad(sharded))(w, x), expected, rtol=1e-5)


@row("H19")
def test_random_numbers_belong_to_the_key():
    drop = rule(
        lambda x: x * (torch.rand_like(x) > 0.5).to(x.dtype),
        lambda g, mask: g * mask,
        lambda inputs, output: [(output != 0).to(output.dtype)],
        name="Drop",
    )
    apply, x, key = host(reading(drop)), jnp.arange(1.0, 33.0), jax.random.key(0)
    state = torch.get_rng_state()
    y = apply(x, key=key)
    assert 0 < (y == 0).sum() < 32 and not (y == apply(x, key=jax.random.key(1))).all()
    np.testing.assert_array_equal(jax.jit(apply)(x, key=key), y)
    np.testing.assert_array_equal(jax.jit(jax.grad(lambda x: apply(x, key=key).sum()))(x) * x, y)
    keys = jax.random.split(key, 2)
    batched = jax.vmap(lambda key: apply(x, key=key))(keys)
    np.testing.assert_array_equal(batched, [apply(x, key=k) for k in keys])
    assert torch.equal(state, torch.get_rng_state())
    with pytest.raises(jaxfn.TranslationError, match="Drop.forward draws random numbers"):
        apply(x)


@row("H19")
def test_shapes_that_depend_on_values():
    positive = rule(lambda x: x[x > 0], lambda g, x: torch.zeros_like(x).masked_scatter(x > 0, g), name="Positive")
    apply, x = host(positive), jnp.array([1.0, -2.0, 3.0])
    with pytest.raises(Exception, match=r"the output is torch.float32\[2\] .* and was torch.float32\[3\] for others"):
        jax.jit(apply)(x).block_until_ready()
    np.testing.assert_allclose(jax.grad(lambda x: (apply(x) ** 2).sum())(x), [2, 0, 6])
    jitted = jax.jit(lambda x: apply(x))
    np.testing.assert_allclose(jitted(x[::-1]), [3, 1])  # as many as in the eager call
    with pytest.raises(Exception, match=r"Positive.forward: TranslationError: the output is torch.float32\[3\]"):
        jitted(x**2).block_until_ready()


@row("H19")
def test_a_forward_that_does_not_end_on_example_values():
    def forward(x):
        y = torch.ones_like(x)
        while (y * y - x).abs().max() > 1e-5 or x.min() < 1:
            y = (y + x / y) / 2
        return y

    x = jnp.array([2.0, 9.0])
    apply = host(rule(forward, lambda g, y: g / (2 * y), output_saved, name="Root"))
    with pytest.raises(jaxfn.TranslationError, match=r"no end after 20000 calls.*call Root.apply once outside"):
        jax.jit(apply)(x)
    np.testing.assert_allclose(apply(x), x**0.5, rtol=1e-5)
    np.testing.assert_allclose(jax.jit(jax.grad(lambda x: apply(x).sum()))(x), 0.5 * x**-0.5, rtol=1e-5)


@row("H19")
def test_arrays_of_the_caller_do_not_change():
    x = jnp.array([0.25, 0.5])
    with pytest.warns(UserWarning, match="^Dirty mutates one of its inputs"):
        y = host(reading(Dirty))(x)
    np.testing.assert_array_equal(y, 3 * np.array([0.25, 0.5]))
    np.testing.assert_array_equal(x, [0.25, 0.5])


@row("H19")
@pytest.mark.parametrize("place", ["output", "ctx", "saved", "beside a large one"])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_forward_that_depends_on_state_raises(place: str, is_compiled: bool):
    count = [0]

    class Counting(Base):
        @staticmethod
        def forward(ctx, x):
            read(x)
            count[0] += 1
            ctx.count = 1 + 0.01 * count[0] if place in ("ctx", "beside a large one") else 1
            ctx.size = 1e9 if place == "beside a large one" else 1
            ctx.save_for_backward(torch.full_like(x, count[0] if place == "saved" else 1))
            return x * (count[0] if place == "output" else 1)

        @staticmethod
        def backward(ctx, g):
            return g * ctx.count * ctx.saved_tensors[0]

    gradient = jax.grad(lambda x: host(Counting)(x).sum())
    with pytest.raises(Exception, match=r"Counting.forward runs again .* stored\s+something else on ctx"):
        jax.block_until_ready((jax.jit(gradient) if is_compiled else gradient)(jnp.ones(3)))


@row("H19")
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
def test_a_second_derivative_raises(wrap: Any):
    Compiled = rule(torch.square, lambda g, x: 2 * g * outside(x, torch.empty_like), name="Compiled")
    x = jnp.array([1.0, 2.0])
    for function in (Compiled, reading(Cube)):
        f = wrap(host(function))

        def slope(x, f=f):
            return jax.grad(lambda x: (f(x) ** 2).sum())(x)

        expected = 4 * x**3 if function is Compiled else 6 * x**5
        np.testing.assert_allclose(jax.jit(slope)(x), expected, rtol=1e-5)
        for second in (jax.jacrev(slope), jax.jit(jax.jacrev(slope))):
            with pytest.raises(jaxfn.TranslationError, match=rf"{function.__name__}: .* it is differentiated once"):
                second(x)


@row("H19")
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
def test_a_forward_that_depends_on_which_inputs_need_a_gradient(wrap: Any):
    class Needed(Base):
        @staticmethod
        def forward(ctx, x, w):
            read(x)
            x_needs, w_needs = ctx.needs_input_grad
            ctx.save_for_backward(w if x_needs else None, x if w_needs else None)
            return torch.rand(()) * x * w

        @staticmethod
        def backward(ctx, g):
            w, x = ctx.saved_tensors
            return None if w is None else g * w, None if x is None else g * x

    f = wrap(functools.partial(host(Needed), key=jax.random.key(0)))
    x, w = jnp.float32(2), jnp.float32(3)
    assert jax.grad(f)(x, w) == 3 and jax.grad(f, (0, 1))(x, w) == (3, 2)


@row("H19")
def test_autocast_of_the_caller():
    apply, x = host(reading(function_of(lambda x: x @ x.T))), jnp.eye(3)
    for f in (apply, jax.jit(apply)):
        with torch.autocast("cpu", torch.bfloat16):
            assert f(x).dtype == jnp.bfloat16
    assert jax.jit(lambda x: apply(x))(x).dtype == jnp.float32


@row("H19")
def test_dtypes_without_x64():
    def backward(g, _, x, indices):
        assert g.dtype == torch.float64
        return torch.zeros_like(g).scatter_add(0, indices.long(), g * 2 * x.gather(0, indices)).to(x.dtype), None

    wide = rule(lambda x, i: (x.double().gather(0, i) ** 2, i.long() * 2**29), backward)
    x, indices = jnp.array([1.0, 2.0, 3.0]), jnp.array([2, 0, 2])
    for f in (host(reading(wide)), jax.jit(host(reading(wide)))):
        y, multiples = f(x, indices)
        assert y.dtype == jnp.float32 and multiples.dtype == jnp.int32
        np.testing.assert_array_equal(multiples, indices * 2**29)
        np.testing.assert_allclose(jax.grad(lambda x: f(x, indices)[0].sum())(x), [2, 0, 12])
        with pytest.raises(Exception, match="integers that need 64 bits"):
            jax.block_until_ready(f(jnp.ones(9), indices * 4))


@row("H19")
def test_calls_in_several_threads():
    f, x = host(reading(Tanh)), jnp.linspace(-1, 1, 7)
    gradients: dict[int, Any] = {}

    def run(i: int) -> None:
        for _ in range(3):
            total = jax.grad(lambda x: f(x * i).sum())
            gradients[i] = (total if i % 2 else jax.jit(total))(x)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for i in range(1, 5):
        np.testing.assert_allclose(gradients[i], i / jnp.cosh(x * i) ** 2, atol=1e-5)


@row("H19")
def test_errors_name_the_function_and_the_line():
    x = jnp.array([1.0, 2.0])
    with pytest.raises(Exception, match=r"(?s)Tanh.forward: ValueError: an infinite value.*test_callback.*raise Val"):
        jax.jit(host(reading(Tanh)))(x / 0).block_until_ready()
    with pytest.raises(ValueError, match="^an infinite value"):
        host(reading(Tanh))(x / 0)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(host(reading(Tanh)), (x,), (x,))
    with pytest.raises(jaxfn.TranslationError, match="Halved.jvp is not called on the host: use reverse mode"):
        jax.jvp(host(reading(Halved)), (x,), (x,))
    with pytest.raises(jaxfn.TranslationError, match="tensors inside a list as output 0"):
        jax.grad(lambda x: host(reading(function_of(lambda x: [x * 2, x * 3])))(x)[0].sum())(x)


@row("H19")
def test_what_can_be_traced_is_traced():
    jaxpr = jax.make_jaxpr(jax.grad(lambda x: host(Tanh)(x).sum()))(jnp.ones(3))
    assert "pure_callback" not in str(jaxpr)
    with pytest.raises(TypeError, match="subclasses of torch.autograd.Function"):
        jaxfn.from_torch(torch.sin, fallback="callback")
    with pytest.raises(ValueError, match="'callback', got 'cond'"):
        jaxfn.from_torch(Tanh, fallback="cond")
