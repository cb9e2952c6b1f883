"""Functions used across the tests, each with an independent reference.

`reference` is plain JAX whose autodiff is the Function's rule at every order (a straight-through estimator is
`x + stop_gradient(round(x) - x)`); `hand_written` is the `jax.custom_vjp` that a JAX user would write.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

import jaxfn
from tests.support.libraries import Library


def host_memory_is_apart() -> bool:
    """Whether JAX distinguishes host memory from the device's; on the CPU 0.10.0 does not, later versions do."""
    on_host = jax.device_put(jnp.zeros(1), jax.memory.Space.Host)
    return on_host.sharding.memory_kind != jax.devices()[0].default_memory().kind


def in_library(function: type[jaxfn.Function], library: Library, **names: Any) -> Any:
    """A Function's very code in a library of `tests.support.libraries`, with other values for the global `names`."""
    names |= {"jnp": library.m, "jax": SimpleNamespace(nn=library.nn), "stop_gradient": library.detach}
    methods = {}
    for name, method in vars(function).items():
        if isinstance(method, staticmethod):
            code = method.__func__
            copy = FunctionType(code.__code__, {**code.__globals__, **names}, name, code.__defaults__, code.__closure__)
            copy.__kwdefaults__ = code.__kwdefaults__
            methods[name] = staticmethod(copy)
    return type(function.__name__, (library.Function,), methods)


@dataclass(frozen=True)
class Case:
    """A Function and its references, as functions of the differentiated arguments only.

    Attributes:
      name: for test ids.
      function: the Function.
      reference: plain JAX with equal derivatives.
      hand_written: a custom_vjp with an equal first derivative.
      args: makes the arguments from a random generator.
      batched: which arguments have a batch axis when the function is mapped; the others are shared weights.
      statics: the arguments that follow those.
    """

    name: str
    function: type[jaxfn.Function]
    reference: Callable[..., Any]
    hand_written: Callable[..., Any]
    args: Callable[[np.random.Generator], tuple[Any, ...]]
    batched: tuple[bool, ...]
    statics: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return self.name

    @functools.cached_property
    def apply(self) -> Callable[..., Any]:
        return self.call(self.function)

    def call(self, function: Any) -> Callable[..., Any]:
        """The call of this Function, by the differentiated arguments."""
        return (lambda *args: function.apply(*args, *self.statics)) if self.statics else function.apply


def array(generator: np.random.Generator, *shape: int) -> jax.Array:
    """Random numbers away from the kinks of rounding and ReLU."""
    values = generator.uniform(0.1, 0.4, shape) + generator.integers(-2, 3, shape)
    return jnp.asarray(values, jnp.float32)


def rule(primal: Callable[..., Any], fwd: Callable[..., Any], bwd: Callable[..., Any]) -> Callable[..., Any]:
    custom = jax.custom_vjp(primal)
    custom.defvjp(fwd, bwd)
    return custom


def stopping(positions: tuple[int, ...], f: Callable[..., Any]) -> Callable[..., Any]:
    """Outputs that have no derivative, as a JAX user would write it."""

    def stopped(*args: Any) -> Any:
        return tuple(stop_gradient(y) if i in positions else y for i, y in enumerate(f(*args)))

    return stopped


def on_host(function: Callable[..., Any], like: Any, *args: Any, vmap_method: str = "sequential") -> Any:
    """Calls a NumPy function, whose result has the shape and dtype of `like`."""
    return jax.pure_callback(lambda *args: function(*map(np.asarray, args)), like, *args, vmap_method=vmap_method)


def with_rules(rules: str, forward: Any, backward: Any, jvp: Any, name: str = "Linear") -> Callable[..., Any]:
    """Returns the call of a Function with "backward" alone, "jvp" alone, "both", or a "generated" forward mode."""
    methods: dict[str, Any] = {"forward": staticmethod(forward), "generate_jvp_rule": rules == "generated"}
    if rules != "jvp":
        methods["backward"] = staticmethod(backward)
    if rules in ("both", "jvp"):
        methods["jvp"] = staticmethod(jvp)
    return type(name, (jaxfn.Function,), methods).apply


def _saved_args(args: tuple[Any, ...], outputs: Any) -> tuple[Any, ...]:
    return args


def function_of(
    rules: str, value: Any, push: Any, pull: Any, saved: Any = _saved_args, name: str = "Made"
) -> Callable[..., Any]:
    """Returns the call of a Function, built from functions of arrays.

    Args:
      rules: which rules it has, as in `with_rules`.
      value: the outputs, of the arguments.
      push: the tangents of the outputs, of what is saved and the tangents.
      pull: the gradients, of what is saved and the gradients of the outputs.
      saved: what is saved, of the tuple of arguments and the outputs.
      name: its name.
    """

    def forward(ctx: Any, *args: Any) -> Any:
        outputs = value(*args)
        ctx.save_for_backward(*saved(args, outputs))
        return outputs

    return with_rules(
        rules,
        forward,
        lambda ctx, *gradients: pull(ctx.saved_tensors, *gradients),
        lambda ctx, *tangents: push(ctx.saved_tensors, *tangents),
        name,
    )


def hand_written_of(value: Any, pull: Any, saved: Any = _saved_args) -> Callable[..., Any]:
    """Returns the `jax.custom_vjp` of these, which is the rule at every order: `fwd` calls it."""
    f = jax.custom_vjp(value)

    def fwd(*args: Any) -> Any:
        outputs = f(*args)
        return outputs, saved(args, outputs)

    def bwd(residuals: Any, gradients: Any) -> Any:
        found = pull(residuals, *(gradients if isinstance(gradients, tuple) else (gradients,)))
        return found if isinstance(found, tuple) else (found,)

    f.defvjp(fwd, bwd)
    return f


class Square(jaxfn.Function):
    """Saves its input."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        return 2 * x * grad_output


class Exp(jaxfn.Function):
    """Saves its output."""

    @staticmethod
    def forward(ctx, x):
        result = jnp.exp(0.3 * x)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx, grad_output):
        (result,) = ctx.saved_tensors
        return 0.3 * result * grad_output


class StraightThrough(jaxfn.Function):
    """Saves nothing; its rule is not its derivative."""

    @staticmethod
    def forward(ctx, x):
        return jnp.round(x)

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output


class Relu(jaxfn.Function):
    """Saves a boolean mask."""

    @staticmethod
    def forward(ctx, x):
        mask = x > 0
        ctx.save_for_backward(mask)
        return jnp.where(mask, x, 0.0)

    @staticmethod
    def backward(ctx, grad_output):
        (mask,) = ctx.saved_tensors
        return jnp.where(mask, grad_output, 0.0)


class Gated(jaxfn.Function):
    """Saves an intermediate, as an attribute."""

    @staticmethod
    def forward(x):
        return x * jax.nn.sigmoid(x), jax.nn.sigmoid(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        (ctx.x,) = inputs
        ctx.sigmoid = output[1]
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, grad_output, _):
        s = jax.nn.sigmoid(ctx.x)
        return grad_output * (s + ctx.x * s * (1 - s))


class Swish(jaxfn.Function):
    """Saves an input and a differentiable intermediate."""

    @staticmethod
    def forward(ctx, x):
        s = jax.nn.sigmoid(x)
        ctx.save_for_backward(x, s)
        return x * s

    @staticmethod
    def backward(ctx, grad_output):
        x, s = ctx.saved_tensors
        return grad_output * (s + x * s * (1 - s))


class Linear(jaxfn.Function):
    """torch's example: an optional bias, and gradients only where they are needed."""

    @staticmethod
    def forward(ctx, input, weight, bias=None):
        ctx.save_for_backward(input, weight, bias)
        output = input @ weight.T
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx, grad_output):
        input, weight, bias = ctx.saved_tensors
        grad_input = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_input = grad_output @ weight
        if ctx.needs_input_grad[1]:
            grad_weight = grad_output.T @ input
        if bias is not None and ctx.needs_input_grad[2]:
            grad_bias = grad_output.sum(0)
        return grad_input, grad_weight, grad_bias


class Mul(jaxfn.Function):
    """Two inputs; gradients only where they are needed, and `None` for tangents and gradients that are zero."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, grad_output):
        x, w = ctx.saved_tensors
        grad_x = grad_output * w if ctx.needs_input_grad[0] else None
        return grad_x, grad_output * x if ctx.needs_input_grad[1] else None


class MulConstant(jaxfn.Function):
    """A static argument, and None for gradients that are zero."""

    @staticmethod
    def forward(ctx, tensor, constant):
        ctx.set_materialize_grads(False)
        ctx.constant = constant
        return tensor * constant

    @staticmethod
    def backward(ctx, grad_output):
        if grad_output is None:
            return None, None
        return grad_output * ctx.constant, None


class Rotate(jaxfn.Function):
    """Two inputs, two outputs, saved by name."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x=x, y=y)
        return jnp.sin(x) * y, jnp.cos(x) + y * y

    @staticmethod
    def backward(ctx, grad_first, grad_second):
        s = ctx.saved_variables
        return {
            "x": grad_first * jnp.cos(s.x) * s.y - grad_second * jnp.sin(s.x),
            "y": grad_first * jnp.sin(s.x) + grad_second * 2 * s.y,
        }


class Dense(jaxfn.Function):
    """Pytrees in and out."""

    @staticmethod
    def forward(ctx, params, x):
        ctx.params, ctx.x = params, x
        return {"out": x @ params["w"] + params["b"], "norm": jnp.sum(x * x)}

    @staticmethod
    def backward(ctx, grads):
        grad_out, grad_norm = grads["out"], grads["norm"]
        grad_params = {"w": ctx.x.T @ grad_out, "b": grad_out.sum(0)}
        return grad_params, grad_out @ ctx.params["w"].T + 2 * ctx.x * grad_norm


class CrossEntropy(jaxfn.Function):
    """Integer labels as an input."""

    @staticmethod
    def forward(ctx, logits, labels):
        ctx.save_for_backward(logits, labels)
        picked = labels[:, None] == jnp.arange(logits.shape[1])
        return -jnp.where(picked, jax.nn.log_softmax(logits, -1), 0.0).sum() / logits.shape[0]

    @staticmethod
    def backward(ctx, grad_output):
        logits, labels = ctx.saved_tensors
        picked = labels[:, None] == jnp.arange(logits.shape[1])
        probabilities = jax.nn.softmax(logits, -1)
        return grad_output * jnp.where(picked, probabilities - 1, probabilities) / logits.shape[0], None


class Spike(jaxfn.Function):
    """A surrogate gradient, with a keyword-only static argument."""

    @staticmethod
    def forward(ctx, x, *, slope=2.0):
        ctx.slope = slope
        ctx.save_for_backward(x)
        return jnp.asarray(x > 0, dtype=x.dtype)

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        return grad_output / (1 + ctx.slope * jnp.abs(x)) ** 2, None


class Quantize(jaxfn.Function):
    """An integer output, an output without derivative, and a gradient for a scalar input."""

    @staticmethod
    def forward(ctx, x, scale):
        codes = jnp.clip(jnp.round(x / scale), -8, 7)
        error = x - codes * scale
        ctx.mark_non_differentiable(error)
        ctx.save_for_backward(codes)
        return codes * scale, jnp.asarray(codes, dtype=jnp.int8), error

    @staticmethod
    def backward(ctx, grad_output, _codes, _error):
        (codes,) = ctx.saved_tensors
        return grad_output, (grad_output * stop_gradient(codes)).sum()


class Normalize(jaxfn.Function):
    """Separate style, a default, and gradients that are summed to the input's shape."""

    @staticmethod
    def forward(x, gain, eps=1e-3):
        return gain * x / jnp.sqrt((x * x).mean(-1, keepdims=True) + eps)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, gain, ctx.eps = inputs
        ctx.save_for_backward(x, gain)

    @staticmethod
    def backward(ctx, grad_output):
        x, gain = ctx.saved_tensors
        r = 1 / jnp.sqrt((x * x).mean(-1, keepdims=True) + ctx.eps)
        g = grad_output * gain
        return r * g - x * r**3 * (g * x).mean(-1, keepdims=True), grad_output * x * r, None


class ComplexSquare(jaxfn.Function):
    """A square with complex gradients in torch's convention."""

    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return z * z

    @staticmethod
    def backward(ctx, grad_output):
        (z,) = ctx.saved_tensors
        return 2 * grad_output * jnp.conj(z)


class Holder:
    """An object that JAX does not look into."""

    def __init__(self, value):
        self.value = value


class Pair(NamedTuple):
    first: Any
    second: Any


class Swap(jaxfn.Function):
    """Returns an input unchanged and a new output, in a namedtuple; takes any number of arrays."""

    @staticmethod
    def forward(ctx, *arrays):
        a, b = arrays
        ctx.save_for_backward(a, b)
        return Pair(b, a * b)

    @staticmethod
    def backward(ctx, grad_b, grad_product):
        a, b = ctx.saved_tensors
        return grad_product * b, grad_b + grad_product * a


LABELS = np.array([0, 2, 1], np.int32)


def straight_through(x, hard):
    return x + stop_gradient(hard - x)


def spike_reference(x):
    soft = x / (1 + 2.0 * jnp.abs(x))
    return straight_through(soft, (x > 0).astype(x.dtype))


def quantize_reference(x, scale):
    codes = stop_gradient(jnp.clip(jnp.round(x / scale), -8, 7))
    soft = x + codes * scale
    return straight_through(soft, codes * scale), codes.astype(jnp.int8), stop_gradient(x - codes * scale)


def quantize_fwd(x, scale):
    codes = jnp.clip(jnp.round(x / scale), -8, 7)
    return (codes * scale, codes.astype(jnp.int8), x - codes * scale), codes


def normalize_reference(x, gain):
    return gain * x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-3)


def normalize_bwd(residuals, g):
    x, gain = residuals
    r = 1 / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-3)
    gg = g * gain
    full = g * x * r
    return r * gg - x * r**3 * (gg * x).mean(-1, keepdims=True), full.sum(tuple(range(full.ndim - gain.ndim)))


def swish_fwd(x):
    s = jax.nn.sigmoid(x)
    return x * s, (x, s)


def swish_bwd(residuals, g):
    x, s = residuals
    return (g * (s + x * s * (1 - s)),)


def gated_fwd(x):
    return (x * jax.nn.sigmoid(x), jax.nn.sigmoid(x)), (x, jax.nn.sigmoid(x))


def gated_bwd(residuals, g):
    x, _ = residuals
    s = jax.nn.sigmoid(x)
    return (g[0] * (s + x * s * (1 - s)),)


def dense(params, x):
    return {"out": x @ params["w"] + params["b"], "norm": jnp.sum(x * x)}


def dense_bwd(residuals, g):
    params, x = residuals
    grad_params = {"w": x.T @ g["out"], "b": g["out"].sum(0)}
    return grad_params, g["out"] @ params["w"].T + 2 * x * g["norm"]


def cross_entropy(logits):
    picked = jnp.asarray(LABELS)[:, None] == jnp.arange(logits.shape[1])
    return -jnp.where(picked, jax.nn.log_softmax(logits, -1), 0.0).sum() / logits.shape[0]


def cross_entropy_bwd(residuals, g):
    logits, labels = residuals
    picked = labels[:, None] == jnp.arange(logits.shape[1])
    probabilities = jax.nn.softmax(logits, -1)
    return (g * jnp.where(picked, probabilities - 1, probabilities) / logits.shape[0],)


def rotate(x, y):
    return jnp.sin(x) * y, jnp.cos(x) + y * y


def rotate_bwd(residuals, g):
    x, y = residuals
    return g[0] * jnp.cos(x) * y - g[1] * jnp.sin(x), g[0] * jnp.sin(x) + g[1] * 2 * y


def linear(x, w, b):
    return x @ w.T + b


def linear_bwd(residuals, g):
    x, w, _ = residuals  # the Function saves its bias too
    return g @ w, g.T @ x, g.sum(0)


def _stopped_gate(x):
    return x * jax.nn.sigmoid(x), stop_gradient(jax.nn.sigmoid(x))


CASES = [
    Case(
        "square", Square, lambda x: x * x,
        rule(lambda x: x * x, lambda x: (x * x, x), lambda x, g: (2 * x * g,)),
        lambda r: (array(r, 4, 3),), (True,),
    ),
    Case(
        "exp", Exp, lambda x: jnp.exp(0.3 * x),
        rule(lambda x: jnp.exp(0.3 * x), lambda x: (jnp.exp(0.3 * x),) * 2, lambda y, g: (0.3 * y * g,)),
        lambda r: (array(r, 4, 3),), (True,),
    ),
    Case(
        "straight_through", StraightThrough, lambda x: straight_through(x, jnp.round(x)),
        rule(lambda x: jnp.round(x), lambda x: (jnp.round(x), None), lambda _, g: (g,)),
        lambda r: (array(r, 4, 3),), (True,),
    ),
    Case(
        "relu", Relu, lambda x: jnp.where(x > 0, x, 0.0),
        rule(
            lambda x: jnp.where(x > 0, x, 0.0),
            lambda x: (jnp.where(x > 0, x, 0.0), x > 0),
            lambda mask, g: (jnp.where(mask, g, 0.0),),
        ),
        lambda r: (array(r, 4, 3),), (True,),
    ),
    Case(
        "gated", Gated, _stopped_gate,
        stopping((1,), rule(lambda x: gated_fwd(x)[0], gated_fwd, gated_bwd)),
        lambda r: (array(r, 4, 3),), (True,),
    ),
    Case(
        "swish", Swish, jax.nn.swish,
        rule(lambda x: x * jax.nn.sigmoid(x), swish_fwd, swish_bwd),
        lambda r: (array(r, 4, 3),), (True,),
    ),
    Case(
        "linear", Linear, linear,
        rule(linear, lambda x, w, b: (linear(x, w, b), (x, w, b)), linear_bwd),
        lambda r: (array(r, 4, 3), array(r, 5, 3), array(r, 5)), (True, False, False),
    ),
    Case(
        "linear_no_bias", Linear, lambda x, w: x @ w.T,
        rule(lambda x, w: x @ w.T, lambda x, w: (x @ w.T, (x, w)), lambda r, g: (g @ r[1], g.T @ r[0])),
        lambda r: (array(r, 4, 3), array(r, 5, 3)), (True, False),
    ),
    Case(
        "mul_constant", MulConstant, lambda x: x * 2.5,
        rule(lambda x: x * 2.5, lambda x: (x * 2.5, None), lambda _, g: (g * 2.5,)),
        lambda r: (array(r, 4, 3),), (True,), (2.5,),
    ),
    Case(
        "rotate", Rotate, rotate,
        rule(rotate, lambda x, y: (rotate(x, y), (x, y)), rotate_bwd),
        lambda r: (array(r, 4, 3), array(r, 4, 3)), (True, True),
    ),
    Case(
        "dense", Dense, dense,
        rule(dense, lambda p, x: (dense(p, x), (p, x)), dense_bwd),
        lambda r: ({"w": array(r, 3, 2), "b": array(r, 2)}, array(r, 4, 3)), (False, True),
    ),
    Case(
        "cross_entropy", CrossEntropy, cross_entropy,
        rule(cross_entropy, lambda x: (cross_entropy(x), (x, jnp.asarray(LABELS))), cross_entropy_bwd),
        lambda r: (array(r, 3, 4),), (True,), (LABELS,),
    ),
    Case(
        "spike", Spike, spike_reference,
        rule(
            lambda x: (x > 0).astype(x.dtype),
            lambda x: ((x > 0).astype(x.dtype), x),
            lambda x, g: (g / (1 + 2.0 * jnp.abs(x)) ** 2,),
        ),
        lambda r: (array(r, 4, 3),), (True,),
    ),
    Case(
        "quantize", Quantize, quantize_reference,
        stopping((1, 2), rule(
            lambda x, scale: quantize_fwd(x, scale)[0], quantize_fwd,
            lambda codes, g: (g[0], (g[0] * codes).sum()),
        )),
        lambda r: (array(r, 4, 3), jnp.float32(0.37)), (True, False),
    ),
    Case(
        "normalize", Normalize, normalize_reference,
        rule(normalize_reference, lambda x, gain: (normalize_reference(x, gain), (x, gain)), normalize_bwd),
        lambda r: (array(r, 4, 3), array(r, 3)), (True, False),
    ),
    Case(
        "swap", Swap, lambda a, b: Pair(b, a * b),
        rule(
            lambda a, b: Pair(b, a * b), lambda a, b: (Pair(b, a * b), (a, b)),
            lambda r, g: (g.second * r[1], g.first + g.second * r[0]),
        ),
        lambda r: (array(r, 4, 3), array(r, 4, 3)), (True, True),
    ),
]  # fmt: skip


def with_attributes(case: Case, attributes: dict[str, Any]) -> Callable[..., Any]:
    """The case's call, of a subclass of its Function that has these class attributes too."""
    return case.call(type(case.function.__name__, (case.function,), attributes))


def make_args(case: Case, batch: int | None = None) -> tuple[Any, ...]:
    """The case's arguments; with `batch`, the batched ones stacked along a new leading axis."""
    if batch is None:
        return case.args(np.random.default_rng(0))
    samples = [case.args(np.random.default_rng(i)) for i in range(batch)]
    return tuple(
        jax.tree.map(lambda *leaves: jnp.stack(leaves), *(sample[i] for sample in samples))
        if batched
        else samples[0][i]
        for i, batched in enumerate(case.batched)
    )


def loss_of(f: Callable[..., Any]) -> Callable[..., jax.Array]:
    """A scalar that is nonlinear in every differentiable output, so that second derivatives pass through them."""

    def loss(*args: Any) -> jax.Array:
        leaves = [x for x in jax.tree.leaves(f(*args)) if jnp.issubdtype(x.dtype, jnp.inexact)]
        return sum((jnp.sum(jnp.sin(0.5 * x)) for x in leaves), start=jnp.float32(0))

    return loss


def residual_bytes(f: Callable[..., Any], args: tuple[Any, ...]) -> int:
    """Counts the bytes of the linearized function's residuals, including arguments that it saves."""
    _, pullback = jax.vjp(f, *args)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pullback))
