"""Contract row H14: custom operations of `torch.library` in torch code, with the backward that is registered."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import jaxfn  # noqa: E402
from jaxfn import TranslationError  # noqa: E402
from tests.support.libraries import (  # noqa: E402
    Jax,
    assert_derivatives_as_torch,
    assert_same,
    make_function,
    torch_library,
)
from tests.support.marks import row  # noqa: E402
from tests.support.torch_code import Net, as_functions, rule  # noqa: E402

pytestmark = [
    pytest.mark.skipif(torch.__version__ < (2, 13), reason="raises, by a test in test_versions.py"),
    pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered"),
    pytest.mark.usefixtures("double_precision"),
]

LIBRARY = torch.library.Library("jaxfn_test_ops", "FRAGMENT")
OPS = torch.ops.jaxfn_test_ops
ARGS = np.linspace(-1.3, 1.7, 5), np.linspace(0.5, 2, 5)


def operation(name: str, **options: Any) -> Any:
    return torch.library.custom_op(f"jaxfn_test_ops::{name}", mutates_args=(), **options)


# --- Operations. No registered backward is the derivative of the code.


def save_inputs(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*(x for x in inputs if isinstance(x, torch.Tensor)))


@operation("steep")
def steep(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x)


def steep_backward(ctx: Any, gradient: Any) -> Any:
    (x,) = ctx.saved_tensors
    return gradient * 1000 * x**3


steep.register_autograd(steep_backward, setup_context=save_inputs)


@operation("for_numpy", device_types="cpu")
def for_numpy(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.sin(x.numpy()))


for_numpy.register_fake(lambda x: torch.empty_like(x))
for_numpy.register_autograd(steep_backward, setup_context=save_inputs)


@operation("for_numpy_alone")
def for_numpy_alone(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.sin(x.detach().numpy()))


@operation("masked", device_types="cpu")
def masked(x: torch.Tensor, scale: float = 3.0, bias: torch.Tensor | None = None) -> torch.Tensor:
    y = x.clone()
    y[y > 0] *= scale
    y.mul_(2)
    return y if bias is None else y + bias


def save_for_masked(ctx: Any, inputs: Any, output: Any) -> None:
    x, ctx.scale, bias = inputs
    ctx.save_for_backward(x, output)
    ctx.has_bias = bias is not None


def masked_backward(ctx: Any, gradient: Any) -> Any:
    x, output = ctx.saved_tensors
    of_x = gradient * output * ctx.scale * x if ctx.needs_input_grad[0] else None
    return of_x, None, gradient * 7 * x if ctx.has_bias and ctx.needs_input_grad[2] else None


masked.register_autograd(masked_backward, setup_context=save_for_masked)


@operation("several")
def several(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return x * w, torch.where(x > 0, x, w), (x > 0).to(torch.int32)


def save_for_several(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs, output[0])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def several_backward(ctx: Any, gradient: Any, of_marked: Any, of_whole: Any) -> Any:
    x, w, product = ctx.saved_tensors
    assert of_marked is None and of_whole is None
    return (None, None) if gradient is None else (gradient * product * 3, gradient * x * w**2)


several.register_autograd(several_backward, setup_context=save_for_several)


@operation("of_list")
def of_list(tensors: list[torch.Tensor], scales: list[float]) -> list[torch.Tensor]:
    return [x * scale for x, scale in zip(tensors, scales, strict=True)]


def save_list(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[0])
    ctx.scales = inputs[1]


def of_list_backward(ctx: Any, gradients: Any) -> Any:
    triples = zip(gradients, ctx.saved_tensors, ctx.scales, strict=True)
    flags = ctx.needs_input_grad[0]
    return [g * 100 * x**2 * s if flag else None for (g, x, s), flag in zip(triples, flags, strict=True)], None


of_list.register_autograd(of_list_backward, setup_context=save_list)


@operation("without_formula")
def without_formula(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(x)


@operation("gradient_by_operations", device_types="cpu")
def gradient_by_operations(x: torch.Tensor) -> torch.Tensor:
    return torch.cos(x)


gradient_by_operations.register_autograd(
    lambda ctx, gradient: steep(gradient) * without_formula(ctx.saved_tensors[0].detach()),
    setup_context=save_inputs,
)

LIBRARY.define("keyword(Tensor x, *, float scale=2.0) -> Tensor")
LIBRARY.impl("keyword", lambda x, *, scale=2.0: x.sin() * scale, "CompositeExplicitAutograd")


def save_keyword(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)
    ctx.scale = keyword_only_inputs["scale"]


torch.library.register_autograd(
    "jaxfn_test_ops::keyword",
    lambda ctx, gradient: gradient * 1000 * ctx.scale * ctx.saved_tensors[0] ** 2,
    setup_context=save_keyword,
    lib=LIBRARY,
)

LIBRARY.define("without_autograd(Tensor x) -> Tensor")
LIBRARY.impl("without_autograd", lambda x: x.sin() * x, "CPU")

LIBRARY.define("overloaded(Tensor x) -> Tensor")
LIBRARY.define("overloaded.scaled(Tensor x, float scale) -> Tensor")
LIBRARY.impl("overloaded", lambda x: x.sin(), "CPU")
LIBRARY.impl("overloaded.scaled", lambda x, scale: x.sin() * scale, "CPU")
torch.library.register_autograd("jaxfn_test_ops::overloaded", lambda ctx, gradient: gradient * 50, lib=LIBRARY)

LIBRARY.define("registered_autograd(Tensor x) -> Tensor")
LIBRARY.impl("registered_autograd", lambda x: x.sin(), "CPU")


def sine_below_autograd(x):
    with torch._C._AutoDispatchBelowAutograd():
        return OPS.registered_autograd(x)


RegisteredAutograd = rule(sine_below_autograd, lambda g, x: g * 1000 * x**2)
LIBRARY.impl(
    "registered_autograd", lambda x: RegisteredAutograd.apply(x) if x.requires_grad else x.detach().sin(), "Autograd"
)


def gradient_inside(f, x, w):
    if not x.requires_grad:
        x = x.detach().requires_grad_()
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad((f(x) * w).sum(), x, create_graph=True)
    return gradient * w


def several_used(x, w):
    product, marked, is_positive = several(x, w)
    return product * marked + is_positive * w


def sine(library):
    """Its derivative is neither the registered one nor that of sin."""
    return make_function(library, library.m.sin, lambda g, x: g * 7 * x**2)


Sin, TorchSin = sine(Jax), sine(torch_library())

# By name: what has the code in it, and the code.
CODE = {
    "twice": ("Function", lambda x, w: steep(steep(x) * w) + steep(w)),
    "packet and overload": ("module", lambda x, w: OPS.steep(x) * w + OPS.steep.default(w)),
    "masks and writes": ("function", lambda x, w: masked(x, 2.5) * w),
    "defaults": ("Function", lambda x, w: masked(x) * w),
    "an optional tensor": ("module", lambda x, w: masked(x, scale=1.5, bias=w) * w),
    "not all need a gradient": ("function", lambda x, w: masked(x.detach(), bias=w) * x),
    "several outputs": ("Function", several_used),
    "one of several outputs": ("module", lambda x, w: several(x, w)[1] * w + x),
    "lists": ("function", lambda x, w: sum(of_list([x, w * x, torch.ones(5)], [2.0, 3.0, 4.0]))),
    "lists, not all differentiated": ("Function", lambda x, w: sum(of_list([x.detach(), w], [2.0, 3.0])) * x),
    "keyword": ("module", lambda x, w: OPS.keyword(x, scale=3.0) * w + OPS.keyword(w)),
    "without autograd": ("function", lambda x, w: OPS.without_autograd(x) * w),
    "overloads": ("Function", lambda x, w: OPS.overloaded(x) * OPS.overloaded(w, 2.0)),
    "a registered autograd": ("module", lambda x, w: OPS.registered_autograd(x) * w),
    "operations in backward": ("Function", lambda x, w: gradient_by_operations(x * w) * w),
    "detached": ("function", lambda x, w: steep(x).detach() * w + steep(x.detach()) * x),
    "gradients inside": ("module", lambda x, w: gradient_inside(steep, x, w)),
    "without autograd, gradients inside": ("Function", lambda x, w: gradient_inside(OPS.without_autograd, x, w)),
}


def function_of(code: Any) -> Any:
    """Its backward has the operation as well, so that a second derivative goes through it."""
    return rule(code, lambda g, x, w: (g * code(x, w), g * w))


def of_module(code: Any, ops: Any) -> tuple[Any, Any]:
    module = Net(lambda self, x: code(x, self.w), w=torch.nn.Parameter(torch.tensor(ARGS[1])))
    return as_functions(module, ops)


KINDS = {
    "function": lambda code, ops: (jaxfn.from_torch(code, ops=ops), code),
    "module": of_module,
    "Function": lambda code, ops: (jaxfn.from_torch(f := function_of(code), ops=ops).apply, f.apply),
}


@row("H14")
@pytest.mark.parametrize("name", CODE)
def test_values_and_derivatives_are_those_of_torch(name):
    kind, code = CODE[name]
    assert_derivatives_as_torch(*KINDS[kind](code, None), ARGS)


@row("H14")
@pytest.mark.parametrize("name", ["twice", "masks and writes", "several outputs", "lists", "keyword"])
def test_under_vmap(name):
    f = jaxfn.from_torch(CODE[name][1])
    loss = lambda x, w: (f(x, w) ** 2).sum()  # noqa: E731
    second = lambda x: jax.grad(lambda x: (jax.grad(loss)(x, ARGS[1]) ** 2).sum())(x)  # noqa: E731
    rows = jnp.asarray(np.stack([ARGS[0], ARGS[0] + 0.3]))
    assert_same(list(jax.vmap(second)(rows)), [np.asarray(second(x)) for x in rows])


@row("H14")
@pytest.mark.parametrize(
    "op, kind",
    [
        (for_numpy, "Function"),
        (OPS.for_numpy, "function"),
        (OPS.for_numpy.default, "module"),
        ("jaxfn_test_ops::for_numpy", "function"),
    ],
    ids=["operation", "packet", "overload", "name"],
)
def test_a_jax_function_uses_the_registered_backward(op, kind):
    assert_derivatives_as_torch(*KINDS[kind](lambda x, w: for_numpy(x) * w, {op: jnp.sin}), ARGS)


@row("H14")
def test_a_jax_function_instead_of_one_that_could_be_traced():
    def code(x, w):
        return several(x, w)[0] * masked(w, 2.0)

    ours = jaxfn.from_torch(code, ops={several: lambda x, w: (x * w, w, x > 0)})
    assert_derivatives_as_torch(ours, code, ARGS)


@row("H14")
@pytest.mark.parametrize(
    "replacement, kind",
    [(Sin, "function"), (Sin.apply, "module"), (Sin, "Function")],
    ids=["class in a function", "apply in a module", "class in a Function"],
)
def test_a_jaxfn_function_brings_its_own_rule(replacement, kind):
    ours, _ = KINDS[kind](lambda x, w: for_numpy(x * w) * w, {for_numpy: replacement})
    _, theirs = KINDS[kind](lambda x, w: TorchSin.apply(x * w) * w, None)
    assert_derivatives_as_torch(ours, theirs, ARGS)


@row("H14")
def test_a_jaxfn_function_where_autograd_is_inside():
    ours = jaxfn.from_torch(lambda x, w: gradient_inside(for_numpy, x, w), ops={for_numpy: Sin})
    assert_derivatives_as_torch(ours, lambda x, w: gradient_inside(TorchSin.apply, x, w), ARGS)


@row("H14")
@pytest.mark.parametrize(
    "op, kind",
    [(for_numpy_alone, "function"), (without_formula, "module"), (OPS.without_autograd, "Function")],
    ids=["no register_fake", "no formula", "no autograd"],
)
def test_without_a_registered_backward_the_jax_function_is_differentiated(op, kind):
    ours, _ = KINDS[kind](lambda x, w: op(x) * w, {op: jnp.tanh})
    _, theirs = KINDS[kind](lambda x, w: torch.tanh(x) * w, None)
    assert_derivatives_as_torch(ours, theirs, ARGS)


@row("H14")
def test_without_a_registered_backward_there_is_no_derivative():
    f = jaxfn.from_torch(lambda x: without_formula(x))
    assert_same([f(ARGS[0])], [np.exp(ARGS[0])])
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        jax.grad(lambda x: f(x).sum())(ARGS[0])


@row("H14")
def test_a_draw_is_repeated_in_backward():
    @operation("noisy")
    def noisy(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mask = torch.rand_like(x) > 0.5
        return x * mask, mask.to(x.dtype)

    noisy.register_autograd(
        lambda ctx, gradient, _: gradient * ctx.saved_tensors[0] * 10,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
    )
    f = jaxfn.from_torch(lambda x: noisy(x)[0])
    x = jnp.ones(64)
    y, pullback = jax.vjp(lambda x: f(x, key=jax.random.key(1)), x)
    assert 0 < y.sum() < 64
    np.testing.assert_array_equal(pullback(x)[0], 10 * y)
    with pytest.raises(TranslationError, match="key"):
        f(x)


# --- What is not supported.


@torch.library.custom_op("jaxfn_test_ops::mutating", mutates_args=("out",))
def mutating(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x.sin())


@torch.library.custom_op("jaxfn_test_ops::mutating_and_returning", mutates_args=("x",))
def mutating_and_returning(x: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return x + 1


LIBRARY.define("in_place(Tensor(a!) x) -> Tensor(a!)")
LIBRARY.impl("in_place", lambda x: x.mul_(2), "CPU")


@row("H14")
@pytest.mark.parametrize(
    "kind, code, message",
    [
        ("function", lambda x, w: mutating(x, out := x.clone()) or out, "mutating.default.*its argument out"),
        ("module", lambda x, w: mutating_and_returning(x * w), "mutating_and_returning.default.*its argument x"),
        ("Function", lambda x, w: OPS.in_place(x.clone()), "in_place.default.*its argument x"),
    ],
    ids=["out", "returning", "in_place"],
)
def test_operations_that_mutate_arguments(kind, code, message):
    ours, _ = KINDS[kind](code, None)
    with pytest.raises(TranslationError, match=f"(?s)calls jaxfn_test_ops.{message}.*ops=.*test_custom_operations"):
        ours(*ARGS)


LIBRARY.define("for_gpus(Tensor x) -> Tensor")
LIBRARY.impl("for_gpus", lambda x: x.sin(), "CPU")
LIBRARY.impl("for_gpus", lambda x: RegisteredAutograd.apply(x), "AutogradCUDA")


@row("H14")
@pytest.mark.parametrize("ops", [None, {OPS.for_gpus: jnp.sin}], ids=["code", "ops"])
def test_a_backward_for_gpus_alone(ops):
    with pytest.raises(TranslationError, match=r"for_gpus.default, whose backward .* AutogradCUDA only"):
        jaxfn.from_torch(lambda x: OPS.for_gpus(x), ops=ops)(ARGS[0])


@row("H14")
@pytest.mark.parametrize("inside", [False, True])
def test_operations_that_others_call(inside):
    """Library code calls them, without a mode for torch's functions."""
    kind = "calling" if inside else "calling_composite"
    LIBRARY.define(f"{kind}(Tensor x) -> Tensor")
    LIBRARY.impl(kind, lambda x: steep(x) * 2, "CPU" if inside else "CompositeImplicitAutograd")
    assert_derivatives_as_torch(*KINDS["module"](lambda x, w: getattr(OPS, kind)(x * w), None), ARGS)


@row("H12", "H14")
def test_torch_is_as_it_was():
    before = torch._library.autograd._C
    module = Net(lambda self, x: steep(x) * self.w, w=torch.nn.Parameter(torch.tensor(ARGS[1])))
    net = jaxfn.from_torch(module)
    jax.grad(lambda p: net.apply(p, net.buffers, ARGS[0])[0].sum())(net.parameters)
    assert torch._library.autograd._C is before
    assert not steep(torch.ones(2)).requires_grad
    x = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        assert not steep(x).requires_grad
    assert torch.equal(torch.autograd.grad(steep(x).sum(), x)[0], torch.full((2,), 1000.0))
