"""The mathematics of the Functions: what each computes, saves and says its derivative is, and its twin in plain JAX.

Everything is Python source. `x`, `w` and `k` are parameters, `c` is closed over, `y0` and `y1` are outputs, `g0` and
`g1` their gradients, `dx` and `dw` tangents; other names are assigned by the steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.fuzz.types import Type, all_batches, broadcast, demand, promoted


@dataclass(frozen=True)
class Saving:
    """One way of writing the rules of a formula.

    Attributes:
      names: what is saved: parameters, steps, outputs.
      grads: the gradient of each parameter, `None` for none, computed from what is saved and from `g0`, `g1`.
      tangents: the tangent of each output, computed from `dx` and `dw`.
    """

    names: tuple[str, ...]
    grads: tuple[str | None, ...]
    tangents: tuple[str | None, ...]


@dataclass(frozen=True)
class Formula:
    """A function with a rule.

    Attributes:
      name: for reports.
      parameters: those that are arrays.
      steps: names and expressions of what is computed before the outputs.
      outputs: expressions.
      savings: by name.
      types: the types of the outputs from those of the parameters, and then of what is closed over.
      twin: expressions whose derivatives are the rule's; the outputs themselves where it is empty.
      depends: the parameters that each output depends on; all of them where it is empty.
      marked: the outputs that are marked non-differentiable.
      statics: further parameters with their values, as source.
      closed: the names that are closed over.
      stateful: whether it draws numbers or counts when it runs.
    """

    name: str
    parameters: tuple[str, ...]
    outputs: tuple[str, ...]
    savings: dict[str, Saving]
    types: Callable[..., list[Type]]
    steps: tuple[tuple[str, str], ...] = ()
    twin: tuple[str, ...] = ()
    depends: tuple[tuple[int, ...], ...] = ()
    marked: tuple[int, ...] = ()
    statics: tuple[tuple[str, str], ...] = ()
    closed: tuple[str, ...] = ()
    stateful: bool = False

    @property
    def output_names(self) -> list[str]:
        """`y0`, `y1`."""
        return [f"y{i}" for i in range(len(self.outputs))]

    @property
    def static_names(self) -> list[str]:
        """The names of the static parameters."""
        return [name for name, _ in self.statics]

    @property
    def body(self) -> list[str]:
        """Lines that compute the steps and the outputs."""
        lines = [*self.steps, *zip(self.output_names, self.outputs, strict=True)]
        return [f"{name} = {expression}" for name, expression in lines]


def _where(condition: Callable[..., bool], outputs: Callable[..., list[Type]]) -> Callable[..., list[Type]]:
    """The types of the outputs where the condition holds of the types of the parameters."""

    def types(*parameters: Type) -> list[Type]:
        demand(condition(*parameters))
        return outputs(*parameters)

    return types


def _are_floats(*types: Type) -> bool:
    return all(t.is_float for t in types)


def _elementwise(*types: Type) -> list[Type]:
    """One output, of the first parameter's shape; the others are broadcast to it."""
    joined = broadcast(*types)
    demand(joined.shape == types[0].shape)
    return [joined]


_same_shapes = _where(lambda *types: len({t.shape for t in types}) == 1, lambda *types: [broadcast(*types)] * 2)
_rows = _where(lambda x: x.is_float and x.rank > 0 and not x.is_empty, lambda x: [x])  # along the last axis
_vector = _where(lambda x: x.is_float and x.rank > 0, lambda x: [x])
_scalar = _where(_are_floats, lambda x: [x.shaped(())])
_reversed_shape = _where(_are_floats, lambda x: [x.shaped(x.shape[::-1])])
_codes = _where(_are_floats, lambda x: [x, Type(x.shape, "int8", x.batches), x])
_independent = _where(_are_floats, lambda x, w: [x, w])
_split = _where(lambda x, w: x.shape == w.shape, lambda x, w: [broadcast(x, w), w])
_linear = _where(
    lambda x, w: x.rank == w.rank == 2 and x.shape[1] == w.shape[1],
    lambda x, w: [Type((x.shape[0], w.shape[0]), promoted(x, w), all_batches(x, w))],
)
_scaled_by_integers = _where(
    lambda x, k: x.is_float and k.dtype == "int32" and x.shape == k.shape, lambda x, k: [x.on(*k.batches)]
)


def _unary(
    name: str,
    output: str,
    derivatives: dict[str, tuple[tuple[str, ...], str]],
    steps: tuple[tuple[str, str], ...] = (),
    twin: str = "",
    statics: tuple[tuple[str, str], ...] = (),
    stateful: bool = False,
) -> Formula:
    """An elementwise function of one parameter; a derivative for each way of saving."""
    savings = {
        kind: Saving(names, (f"g0 * ({derivative})",), (f"dx * ({derivative})",))
        for kind, (names, derivative) in derivatives.items()
    }
    twins = (twin,) if twin else ()
    return Formula(
        name, ("x",), (output,), savings, _elementwise, steps=steps, twin=twins, statics=statics, stateful=stateful
    )


# Away from zero and from halves, which other values hit exactly and rounding errors then decide.
_ROUNDED = "jnp.round(1.37 * x + 0.123)"
_MASK = ("mask", "x > 0.0123")
_SIGMOID = ("s", "jax.nn.sigmoid(1.7 * x)")

_UNARY = [
    _unary(
        "square", "0.5 * m * x",
        {"input": (("x",), "0.6 * x"), "intermediate": (("m",), "m")},
        steps=(("m", "0.6 * x"),),
    ),
    _unary(
        "exp", "jnp.exp(0.3 * x)",
        {"input": (("x",), "0.3 * jnp.exp(0.3 * x)"), "output": (("y0",), "0.3 * y0")},
    ),
    _unary(
        "tanh", "jnp.tanh(x)",
        {"output": (("y0",), "1 - y0 * y0"), "intermediate": (("d",), "d")},
        steps=(("d", "1 - jnp.tanh(x) ** 2"),),
    ),
    _unary("sin", "jnp.sin(x)", {"intermediate": (("c",), "c")}, steps=(("c", "jnp.cos(x)"),)),
    _unary(
        "gelu", "x * s",
        {
            "input and intermediate": (("x", "s"), "s + 1.7 * x * s * (1 - s)"),
            "input and output": (("x", "y0"), "jax.nn.sigmoid(1.7 * x) + 1.7 * y0 * (1 - jax.nn.sigmoid(1.7 * x))"),
        },
        steps=(_SIGMOID,),
    ),
    _unary("relu", "jnp.where(mask, x, 0)", {"mask": (("mask",), "jnp.where(mask, 1, 0)")}, steps=(_MASK,)),
    _unary("round", _ROUNDED, {"nothing": ((), "1")}, twin="straight_through(y0, x)"),
    _unary(
        "round saving its output", _ROUNDED, {"output": (("y0",), "0.5 * y0")},
        twin="stop_gradient(y0) * jnp.exp(0.5 * (x - stop_gradient(x)))",
    ),
    _unary(
        "round saving an intermediate", "0.3 * m * x", {"intermediate": (("m",), "0.3 * m")}, steps=(("m", _ROUNDED),)
    ),
    _unary(
        "spike", "(x > 0.0123).astype(x.dtype)", {"input": (("x",), "1 / (1 + 2 * jnp.abs(x)) ** 2")},
        twin="straight_through(y0, x / (1 + 2 * jnp.abs(x)))",
    ),
    _unary("scale", "x * factor", {"static": (("factor",), "factor")}, statics=(("factor", "1.5"),)),
]  # fmt: skip

# Its forward calls a Function, whose rule the saved intermediate and `backward` itself are differentiated by.
_NESTED = _unary(
    "nested", "0.5 * m * m", {"input": (("x",), "inner(x)"), "intermediate": (("m",), "m")},
    steps=(("m", "inner(x)"),), twin="0.5 * straight_through(jnp.round(1.37 * x + 0.123), x) ** 2",
)  # fmt: skip

_OTHERS = [
    _NESTED,
    Formula(
        "softmax", ("x",), ("jax.nn.softmax(x)",),
        {"output": Saving(
            ("y0",), ("y0 * (g0 - (g0 * y0).sum(-1, keepdims=True))",),
            ("y0 * (dx - (dx * y0).sum(-1, keepdims=True))",),
        )},
        _rows,
    ),
    Formula(
        "normalize", ("x",), ("x * r",),
        {"input and intermediate": Saving(
            ("x", "r"), ("r * g0 - x * r**3 * (g0 * x).sum(-1, keepdims=True)",),
            ("r * dx - x * r**3 * (dx * x).sum(-1, keepdims=True)",),
        )},
        _rows, steps=(("r", "jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + 1)"),),
    ),
    Formula(
        "energy", ("x",), ("(x * x).sum()",),
        {"input": Saving(("x",), ("2 * x * g0",), ("(2 * x * dx).sum()",))}, _scalar,
    ),
    Formula(
        "transpose", ("x",), ("2 * x.T",), {"nothing": Saving((), ("2 * g0.T",), ("2 * dx.T",))}, _reversed_shape
    ),
    Formula(
        "cumsum", ("x",), ("jnp.cumsum(x, 0)",),
        {"nothing": Saving((), ("jnp.flip(jnp.cumsum(jnp.flip(g0, 0), 0), 0)",), ("jnp.cumsum(dx, 0)",))}, _vector,
    ),
    Formula(
        "mul", ("x", "w"), ("x * w",),
        {"input": Saving(("x", "w"), ("g0 * w", "g0 * x"), ("dx * w + x * dw",))}, _elementwise,
    ),
    Formula(
        "mul without a gradient for w", ("x", "w"), ("x * w",),
        {"input": Saving(("w",), ("g0 * stop_gradient(w)", None), ("dx * stop_gradient(w)",))}, _elementwise,
        twin=("x * stop_gradient(w)",),
    ),
    Formula(
        "linear", ("x", "w"), ("x @ w.T",),
        {"input": Saving(("x", "w"), ("g0 @ w", "g0.T @ x"), ("dx @ w.T + x @ dw.T",))}, _linear,
    ),
    Formula(
        "rotate", ("x", "w"), ("sine * w", "jnp.cos(x) + w * w"),
        {
            "input": Saving(
                ("x", "w"), ("g0 * jnp.cos(x) * w - g1 * jnp.sin(x)", "g0 * jnp.sin(x) + 2 * g1 * w"),
                ("dx * jnp.cos(x) * w + jnp.sin(x) * dw", "2 * w * dw - jnp.sin(x) * dx"),
            ),
            "input and intermediate": Saving(
                ("x", "w", "sine"), ("g0 * jnp.cos(x) * w - g1 * sine", "g0 * sine + 2 * g1 * w"),
                ("dx * jnp.cos(x) * w + sine * dw", "2 * w * dw - sine * dx"),
            ),
        },
        _same_shapes, steps=(("sine", "jnp.sin(x)"),),
    ),
    Formula(
        "split", ("x", "w"), ("x * w", "m * w"),
        {
            "input": Saving(("x", "w"), ("g0 * w", "g0 * x + 0.6 * g1 * w"), ("dx * w + x * dw", "0.6 * w * dw")),
            "input and intermediate": Saving(
                ("x", "w", "m"), ("g0 * w", "g0 * x + 2 * g1 * m"), ("dx * w + x * dw", "2 * m * dw")
            ),
        },
        _split, steps=(("m", "0.3 * w"),), depends=((0, 1), (1,)),
    ),
    Formula(
        "independent", ("x", "w"), ("0.5 * x", "jnp.sin(w)"),
        {"input": Saving(("w",), ("0.5 * g0", "g1 * jnp.cos(w)"), ("0.5 * dx", "dw * jnp.cos(w)"))},
        _independent, depends=((0,), (1,)),
    ),
    Formula(
        "swish", ("x",), ("x * s", "s"),
        {
            "input": Saving(
                ("x",), ("g0 * (jax.nn.sigmoid(1.7 * x) * (1 + 1.7 * x * (1 - jax.nn.sigmoid(1.7 * x))))",),
                ("dx * (jax.nn.sigmoid(1.7 * x) * (1 + 1.7 * x * (1 - jax.nn.sigmoid(1.7 * x))))", None),
            )
        },
        _same_shapes, steps=(_SIGMOID,), marked=(1,), twin=("x * s", "stop_gradient(s)"),
    ),
    Formula(
        "quantize", ("x",), ("0.37 * codes", "codes.astype(jnp.int8)", "x - 0.37 * codes"),
        {"nothing": Saving((), ("g0",), ("dx", None, None))},
        _codes, steps=(("codes", "jnp.clip(jnp.round(x / 0.37 + 0.123), -8, 7)"),), marked=(2,),
        twin=("straight_through(y0, x)", "y1", "stop_gradient(y2)"),
    ),
    Formula(
        "integers", ("x", "k"), ("x * (k + 1).astype(x.dtype)",),
        {"input": Saving(
            ("k",), ("g0 * (k + 1).astype(g0.dtype)", None), ("dx * (k + 1).astype(dx.dtype)",)
        )},
        _scaled_by_integers,
    ),
    Formula(
        "closing", ("x",), ("x * jnp.sin(c)",),
        {
            "nothing": Saving((), ("g0 * jnp.sin(c)",), ("dx * jnp.sin(c)",)),
            "intermediate": Saving(("m",), ("g0 * m",), ("dx * m",)),
        },
        _elementwise, steps=(("m", "jnp.sin(c)"),), closed=("c",),
    ),
]  # fmt: skip

# Linear in x, so that x times the gradient is the output, if both belong to one draw.
_STATEFUL = [
    _unary(
        "drops by numpy", "x * m", {"intermediate": (("m",), "m")}, steps=(("m", "drawn_by_numpy(x.shape)"),),
        stateful=True,
    ),
    _unary(
        "drops by key", "x * m", {"intermediate": (("m",), "m")}, steps=(("m", "drawn_by_key(x.shape)"),),
        stateful=True,
    ),
    _unary(
        "counts", "x * factor", {"static": (("factor",), "factor")}, steps=(("factor", "counted()"),), stateful=True
    ),
    _unary("calls back", "called_back(2 * x)", {"nothing": ((), "2")}, stateful=True),
    _unary(
        "debugs", "2 * m * x", {"input and intermediate": (("x", "m"), "2 * m + 0 * x")},
        steps=(("m", "1 + 0 * jnp.cos(noted(x))"),), stateful=True,
    ),
]  # fmt: skip

FORMULAS = {formula.name: formula for formula in _UNARY + _OTHERS + _STATEFUL}
PURE = [formula.name for formula in _UNARY + _OTHERS]
STATEFUL = [formula.name for formula in _STATEFUL]
