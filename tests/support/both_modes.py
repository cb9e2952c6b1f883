"""Functions whose `jvp` and `backward` differ on purpose, and what every mix of derivatives of them must be.

`jvp` is twice the true derivative and `backward` is three times it, so a derivative shows which rules computed it.
The reference knows in advance in which mode each differentiation goes, innermost first, and consists of nothing but
`jax.custom_jvp` and `jax.custom_vjp`: the first differentiation meets a function with the rule of its mode alone, which
calls, for its value, a function with the rule of the second differentiation's mode, and so on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

import jaxfn
from tests.support import cases
from tests.support.libraries import Jax, make_function

FORWARD, REVERSE = "forward", "reverse"
Modes = tuple[str, ...]


# Which rules a Function has: "jvp" and "generated" have one for both modes.
RULES = ("backward", "both", "generated", "jvp")


@dataclass(frozen=True)
class Case:
    """A Function, and the parts of its reference.

    Attributes:
      name: for test ids.
      function: the Function, with both rules.
      plain: plain JAX with equal differentiable outputs.
      args: the differentiated arguments.
      push: tangents of the outputs from arguments, outputs and tangents; twice JAX's own if it is omitted.
      pull: cotangents of the arguments from arguments, outputs and cotangents; three times JAX's own if it is omitted.
      others: the outputs without derivative that follow the differentiable ones.
      statics: the arguments that follow those.
    """

    name: str
    function: type[jaxfn.Function]
    plain: Callable[..., Any]
    args: tuple[Any, ...]
    push: Callable[..., Any] | None = None
    pull: Callable[..., Any] | None = None
    others: Callable[..., tuple[Any, ...]] = lambda *_: ()
    statics: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return self.name

    def apply(self, rules: str = "both") -> Callable[..., Any]:
        """The call of the Function, by the differentiated arguments, with these of its rules."""
        without = {"jvp": "backward", "backward": "jvp", "generated": "jvp"}.get(rules)
        attributes = {without: getattr(jaxfn.Function, without)} if without else {}
        attributes["generate_jvp_rule"] = rules == "generated"
        function = type(self.function.__name__, (self.function,), attributes)
        return lambda *args: function.apply(*args, *self.statics)

    def reference(self, modes: Modes, rules: str = "both") -> Callable[..., Any]:
        """The function whose first differentiation goes in mode `modes[0]`, that one's in `modes[1]`, and so on."""
        push, pull = self.push or self._twice, self.pull or self._thrice
        if rules == "generated":
            push = self._transposed(pull)
        # JAX transposes a `jvp` itself.
        model = _function((FORWARD,) * len(modes) if rules == "jvp" else modes, self.plain, push, pull)
        return lambda *args: (model(*args), *map(stop_gradient, self.others(*args)))

    def _twice(self, args: Any, outputs: Any, tangents: Any) -> Any:
        return scaled(2, jax.jvp(self.plain, args, tangents)[1])

    def _thrice(self, args: Any, outputs: Any, cotangents: Any) -> Any:
        return scaled(3, jax.vjp(self.plain, *args)[1](cotangents))

    def _transposed(self, pull: Callable[..., Any]) -> Callable[..., Any]:
        def push(args: Any, outputs: Any, tangents: Any) -> Any:
            return jax.linear_transpose(lambda g: tuple(pull(args, outputs, g)), outputs)(tuple(tangents))[0]

        return push


def scaled(factor: float, tree: Any) -> Any:
    return jax.tree.map(lambda x: factor * x, tree)


def _function(modes: Modes, plain: Any, push: Any, pull: Any) -> Callable[..., Any]:
    if not modes:
        return plain
    again = _function(modes[1:], plain, push, pull)
    if modes[0] == REVERSE:
        reverse = jax.custom_vjp(lambda *args: again(*args))
        reverse.defvjp(lambda *args: (lambda y: (y, (args, y)))(again(*args)), lambda r, g: tuple(pull(*r, g)))
        return reverse
    forward = jax.custom_jvp(lambda *args: again(*args))

    @forward.defjvp
    def _(args, tangents):
        outputs = again(*args)
        return outputs, push(args, outputs, tangents)

    return forward


def in_both_modes(function: type[jaxfn.Function], true_jvp: Callable[..., Any]) -> type[jaxfn.Function]:
    """A subclass whose jvp is twice `true_jvp` and whose backward is three times the function's."""

    class InBothModes(function):
        @staticmethod
        def jvp(ctx, *tangents):
            return scaled(2, true_jvp(ctx, *tangents))

        @staticmethod
        def backward(ctx, *grad_outputs):
            return scaled(3, function.backward(ctx, *grad_outputs))

    return InBothModes


def _swish_jvp(ctx, tangent):
    x, s = ctx.saved_tensors
    return (s + x * s * (1 - s)) * tangent


def _rotate_jvp(ctx, of_x, of_y):
    x, y = ctx.saved_variables.x, ctx.saved_variables.y
    return jnp.cos(x) * y * of_x + jnp.sin(x) * of_y, 2 * y * of_y - jnp.sin(x) * of_x


def _dense_jvp(ctx, of_params, of_x):
    out = ctx.x @ of_params["w"] + of_x @ ctx.params["w"] + of_params["b"]
    return {"norm": 2 * jnp.sum(ctx.x * of_x), "out": out}


def _normalize_jvp(ctx, of_x, of_gain, of_eps):
    assert of_eps is None
    x, gain = ctx.saved_tensors
    r = 1 / jnp.sqrt((x * x).mean(-1, keepdims=True) + ctx.eps)
    return of_gain * x * r + gain * (r * of_x - x * r**3 * (x * of_x).mean(-1, keepdims=True))


def _swap_jvp(ctx, of_a, of_b):
    a, b = ctx.saved_tensors
    return of_b, of_a * b + a * of_b


class Sine(jaxfn.Function):
    """Saves one thing for `jvp` and another for `backward`."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.save_for_forward(jnp.cos(x), None)
        return jnp.sin(x)

    @staticmethod
    def jvp(ctx, tangent):
        cos, nothing = ctx.saved_tensors
        assert nothing is None
        return 2 * cos * tangent

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        return 3 * jnp.cos(x) * grad_output


def _mul_jvp(ctx, of_x, of_w):
    x, w = ctx.saved_tensors
    terms = [t * y for t, y in ((of_x, w), (of_w, x)) if t is not None]
    return sum(terms[1:], start=terms[0])


def _take_jvp(tangent, of_index, index):
    assert of_index is None
    return 4 * tangent[index], None


# An integer input, and an integer output.
Take = make_function(
    Jax,
    lambda x, index: (x[index] * 2, index + 1),
    lambda g, _, index: (6 * jnp.zeros(2).at[index].add(g), None),
    lambda inputs, output: inputs[1:],
    jvp=_take_jvp,
)
# An output that was marked non-differentiable, and which is saved.
Gated = make_function(
    Jax,
    cases.Gated.forward,
    lambda g, _, x, s: 3 * (s + x * s * (1 - s)) * g,
    lambda inputs, output: (*inputs, output[1]),
    jvp=lambda tangent, x, s: (2 * (s + x * s * (1 - s)) * tangent, None),
    marked=1,
)


def _gated_slope(x):
    s = stop_gradient(jax.nn.sigmoid(x))  # the saved output has no derivative
    return s + x * s * (1 - s)


def _vector(*values: float) -> jax.Array:
    return jnp.asarray(values, jnp.float32)


INDEX = np.array([1, 1, 0])
_X, _Y = _vector(0.3, -1.2), _vector(0.7, 0.4)

CASES = [
    Case(
        "input", in_both_modes(cases.Square, lambda ctx, t: 2 * ctx.saved_tensors[0] * t), lambda x: x * x, (_X,)
    ),
    Case(
        "output", in_both_modes(cases.Exp, lambda ctx, t: 0.3 * ctx.saved_tensors[0] * t), lambda x: jnp.exp(0.3 * x),
        (_X,), lambda args, y, t: 0.6 * y * t[0], lambda args, y, g: (0.9 * y * g,),
    ),
    Case(
        "nothing", in_both_modes(cases.StraightThrough, lambda ctx, t: t), jnp.round,
        (_X,), lambda args, y, t: 2 * t[0], lambda args, y, g: (3 * g,),
    ),
    Case("intermediate", in_both_modes(cases.Swish, _swish_jvp), jax.nn.swish, (_X,)),
    Case("save_for_forward", Sine, jnp.sin, (_X,)),
    Case("two_inputs", in_both_modes(cases.Mul, _mul_jvp), jnp.multiply, (_X, _Y)),
    Case("two_outputs", in_both_modes(cases.Rotate, _rotate_jvp), cases.rotate, (_X, _Y)),
    Case(
        "pytrees", in_both_modes(cases.Dense, _dense_jvp), cases.dense,
        ({"w": _Y[:, None], "b": _vector(0.2)}, _X[None]),
    ),
    # A full matrix, next to a static argument.
    Case("static", in_both_modes(cases.Normalize, _normalize_jvp), cases.normalize_reference, (_X, jnp.float32(0.7))),
    Case(
        "integers", Take, lambda x: x[INDEX] * 2, (_X,),
        others=lambda x: (jnp.asarray(INDEX + 1),), statics=(INDEX,),
    ),
    Case(
        "non_differentiable", Gated, jax.nn.swish, (_X,),
        lambda args, y, t: 2 * _gated_slope(*args) * t[0], lambda args, y, g: (3 * _gated_slope(*args) * g,),
        lambda x: (jax.nn.sigmoid(x),),
    ),
    Case("namedtuple", in_both_modes(cases.Swap, _swap_jvp), lambda a, b: cases.Pair(b, a * b), (_X, _Y)),
]  # fmt: skip
