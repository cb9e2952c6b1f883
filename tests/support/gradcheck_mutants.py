"""Mistakes planted in right backward rules.

A base is a definition as in `gradcheck_pairs`, right for torch and JAX alike. A mutant is the base's source with one
piece of text replaced, so both have one and only that bug.
"""

from __future__ import annotations

import inspect
import linecache
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.support.gradcheck_pairs import complex_, distinct, integers, positive, real, regular, rule
from tests.support.libraries import Define, Kind, output_saved


@dataclass(frozen=True)
class Base:
    """A right definition.

    Attributes:
      define: writes the Function in a library.
      inputs: see `gradcheck_pairs.generated`.
    """

    define: Define
    inputs: tuple[Any, ...]

    def __str__(self) -> str:
        return self.define.__name__

    @property
    def source(self) -> str:
        """The definition without its decorator."""
        return re.sub(r"\A.*?^(?=def )", "", inspect.getsource(self.define), flags=re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Mutant:
    """A base with one mistake in it.

    Attributes:
      base: the right definition.
      mistake: what is wrong.
      old: the text, found once in the base's source.
      new: what replaces it.
      kind: the check that catches it; a mistake for gradgradcheck leaves the first derivative right.
    """

    base: Base
    mistake: str
    old: str
    new: str
    kind: Kind

    def __str__(self) -> str:
        return f"{self.base}: {self.mistake}"

    @property
    def define(self) -> Define:
        source = self.base.source
        assert source.count(self.old) == 1, f"{self}: {self.old!r} is there {source.count(self.old)} times"
        mutated = source.replace(self.old, self.new)
        filename = f"<{self}: {self.old!r} -> {self.new!r}>"
        # As if it were a file, so that reports can quote the line.
        linecache.cache[filename] = len(mutated), None, mutated.splitlines(keepends=True), filename
        namespace: dict[str, Any] = dict(globals())
        exec(compile(mutated, filename, "exec"), namespace)
        return namespace[self.base.define.__name__]


BASES: list[Base] = []
MUTANTS: list[Mutant] = []

Mistake = tuple[str, str, str]  # what kind it is, the text, what stands there instead


def base(*inputs: Any, first: list[Mistake], second: list[Mistake]) -> Callable[[Define], Define]:
    """Enters a base and its mutants: `first` are due to gradcheck, `second` to gradgradcheck."""

    def enter(define: Define) -> Define:
        new_base = Base(define, inputs)
        BASES.append(new_base)
        MUTANTS.extend(Mutant(new_base, *mistake, "gradcheck") for mistake in first)
        MUTANTS.extend(Mutant(new_base, *mistake, "gradgradcheck") for mistake in second)
        return define

    return enter


def spot(lib: Any, *shape: int) -> Any:
    """Zeros, and a one at the very end."""
    return lib.array(np.arange(float(np.prod(shape))).reshape(shape) == np.prod(shape) - 1)


@base(
    real(3, 4),
    first=[
        ("wrong sign", "1 - y * y", "1 + y * y"),
        ("factor 1.001", "g * (", "1.001 * g * ("),
        ("factor 0.999", "g * (", "0.999 * g * ("),
        ("dropped term", "1 - y * y", "1.0"),
        ("wrong saved tensor", ", output_saved", ""),
        ("wrong for large values", "1 - y * y", "lib.m.where(lib.m.abs(y) > 0.85, 0.0, 1 - y * y)"),
        ("wrong at one entry", "1 - y * y", "lib.m.where(spot(lib, 3, 4), 1.01 - y * y, 1 - y * y)"),
    ],
    second=[
        ("saved output cut off", "y * y", "lib.detach(y * y)"),
        ("half of the saved output cut off", "y * y", "y * lib.detach(y)"),
        ("gradient cut off", "g * (", "lib.detach(g) * ("),
    ],
)
def tanh(lib):
    return rule(lib, lib.m.tanh, lambda g, y: g * (1 - y * y), output_saved)


@base(
    real(4, 4),
    real(4, 4),
    real(4),
    first=[
        ("transposed", "g @ w", "g @ w.T"),
        ("transposed", "g.T @ x", "x.T @ g"),
        ("swapped gradients", "g @ w, g.T @ x", "g.T @ x, g @ w"),
        ("no gradient", "g.sum(0)", "None"),
        ("mean for sum", "g.sum(0)", "g.mean(0)"),
        ("wrong axis", "g.sum(0)", "g.sum(1)"),
        ("missing sum", "g.sum(0)", "g[0]"),
        ("factor 1.001", "g.T @ x", "1.001 * (g.T @ x)"),
        ("off by one", "g.T @ x", "g.T @ lib.m.roll(x, 1, 0)"),
        ("half of the matrix", "g.T @ x", "lib.m.tril(g.T @ x)"),
    ],
    second=[
        ("saved weight cut off", "g @ w", "g @ lib.detach(w)"),
        ("saved input cut off", "g.T @ x", "g.T @ lib.detach(x)"),
        ("gradient cut off", "g.sum(0)", "lib.detach(g).sum(0)"),
    ],
)
def linear(lib):
    return rule(lib, lambda x, w, b: x @ w.T + b, lambda g, x, w, b: (g @ w, g.T @ x, g.sum(0)))


@base(
    real(3, 4),
    real(3, 1),
    real(),
    first=[
        ("missing sum over a broadcast axis", "(g * x).sum(1, keepdims=True)", "(g * x)[:, :1]"),
        ("mean for sum", "(g * x).sum(1", "(g * x).mean(1"),
        ("wrong axis", "(g * x).sum(1, keepdims=True)", "(g * x).sum(0)[:3, None]"),
        ("missing sum over all axes", "g.sum()", "g[0, 0]"),
        ("dropped factor", "g * v", "g"),
        ("dropped factor", "(g * x)", "g"),
        ("result for input", "(g * x)", "(g * (x * v))"),
    ],
    second=[("saved input cut off", "(g * x)", "(g * lib.detach(x))")],
)
def scale_and_shift(lib):
    def backward(g, x, v, c):
        return g * v, (g * x).sum(1, keepdims=True), g.sum()

    return rule(lib, lambda x, v, c: x * v + c, backward)


@base(
    real(3, 4),
    first=[
        ("dropped term", "g - (g * y).sum(-1, keepdims=True)", "g"),
        ("wrong sign", "g - (", "g + ("),
        ("wrong axis", "sum(-1", "sum(0"),
        ("dropped factor", "(g * y)", "g"),
        ("diagonal only", "g - (g * y).sum(-1, keepdims=True)", "g * (1 - y)"),
        ("wrong for large values", "return y * (", "return lib.m.where(y > 0.5, 0.98 * y, y) * ("),
    ],
    second=[
        ("saved output cut off", "return y", "return lib.detach(y)"),
        ("saved output cut off in one term", "(g * y)", "(g * lib.detach(y))"),
    ],
)
def softmax(lib):
    def backward(g, y):
        return y * (g - (g * y).sum(-1, keepdims=True))

    return rule(lib, lambda x: lib.nn.softmax(x, -1), backward, output_saved)


@base(
    real(3, 4),
    positive(4),
    real(4),
    first=[
        ("dropped term", " - h.mean(-1, keepdims=True)", ""),
        ("dropped term", " - normal * (h * normal).mean(-1, keepdims=True)", ""),
        ("dropped factor", "g * gain", "g"),
        ("mean for sum", "(g * normal).sum(0)", "(g * normal).mean(0)"),
        ("divided by n - 1", "(h * normal).mean(-1, keepdims=True)", "(h * normal).sum(-1, keepdims=True) / 3"),
        ("swapped gradients", "(g * normal).sum(0), g.sum(0)", "g.sum(0), (g * normal).sum(0)"),
        ("eps missing", "normalize(x, 0.05)\n        h", "normalize(x, 0.0)\n        h"),
        ("stale value", "(g * normal).sum(0)", "(g * x).sum(0)"),
    ],
    second=[("scale cut off", "return h * scale", "return h * lib.detach(scale)")],
)
def layer_norm(lib):
    def normalize(x, eps):
        centred = x - x.mean(-1, keepdims=True)
        scale = 1 / lib.m.sqrt((centred * centred).mean(-1, keepdims=True) + eps)
        return centred * scale, scale

    def forward(x, gain, bias):
        normal, _ = normalize(x, 0.05)
        return normal * gain + bias

    def backward(g, x, gain, bias):
        normal, scale = normalize(x, 0.05)
        h = g * gain
        h = h - h.mean(-1, keepdims=True) - normal * (h * normal).mean(-1, keepdims=True)
        return h * scale, (g * normal).sum(0), g.sum(0)

    return rule(lib, forward, backward)


@base(
    real(3, 4),
    integers(4, 3),
    first=[
        ("labels ignored", "p - picked(labels)", "p"),
        ("mean forgotten", " / 3, None", ", None"),
        ("off by one", "p - picked(labels)", "p - picked((labels + 1) % 4)"),
        ("wrong axis", "softmax(x, -1)\n        return g", "softmax(x, 0)\n        return g"),
        ("mistaken for the squared error", "(p - picked(labels))", "p * (p - picked(labels))"),
    ],
    second=[("probabilities cut off", "(p - picked", "(lib.detach(p) - picked")],
)
def cross_entropy(lib):
    def picked(labels):
        return lib.m.where(labels[:, None] == lib.m.arange(4), 1.0, 0.0)

    def forward(x, labels):
        return -(picked(labels) * lib.nn.log_softmax(x, -1)).sum() / 3

    def backward(g, x, labels):
        p = lib.nn.softmax(x, -1)
        return g * (p - picked(labels)) / 3, None

    return rule(lib, forward, backward)


@base(
    real(7),
    real(3),
    first=[
        ("flipped", "w[k] * spread", "w[2 - k] * spread"),
        ("off by one", "spread(g, k) for", "lib.m.roll(spread(g, k), 1, 0) for"),
        ("dropped tap", "in (0, 1, 2))", "in (0, 1))"),
        ("off by one", "g * x[k : k + 5]", "g * x[2 - k : 7 - k]"),
        ("border dropped", "(g * x[k : k + 5]).sum()", "(g * x[k : k + 5])[:-1].sum()"),
    ],
    second=[("weight cut off", "w[k] * spread", "lib.detach(w[k]) * spread")],
)
def convolution(lib):
    def spread(g, k):
        return lib.m.concatenate([0 * g[:k], g, 0 * g[: 2 - k]])

    def backward(g, x, w):
        grad_w = lib.m.stack([(g * x[k : k + 5]).sum() for k in range(3)])
        return sum(w[k] * spread(g, k) for k in (0, 1, 2)), grad_w

    return rule(lib, lambda x, w: sum(w[k] * x[k : k + 5] for k in range(3)), backward)


@base(
    real(4, 2),
    real(),
    first=[
        ("not carried", "g[t] + a * carried", "g[t]"),
        ("dropped factor", "a * carried", "carried"),
        ("wrong order", "grads[::-1]", "grads"),
        ("off by one", "before = h[t - 1]", "before = h[t]"),
        ("wrapped around", "if t > 0 else 0 * h[0]", ""),
        ("not accumulated", "grad_a + (carried", "(carried"),
    ],
    second=[("state cut off", "before = h[t - 1]", "before = lib.detach(h)[t - 1]")],
)
def recurrence(lib):
    def forward(x, a):
        states = [x[0]]
        for t in range(1, 4):
            states.append(a * states[-1] + x[t])
        return lib.m.stack(states)

    def backward(g, a, h):
        carried, grad_a, grads = 0 * g[0], 0 * a, []
        for t in reversed(range(4)):
            carried = g[t] + a * carried
            before = h[t - 1] if t > 0 else 0 * h[0]
            grad_a = grad_a + (carried * before).sum()
            grads.append(carried)
        return lib.m.stack(grads[::-1]), grad_a

    return rule(lib, forward, backward, lambda inputs, output: (inputs[1], output))


@base(
    real(5, 2),
    np.array([0, 3, 3, 1, 0, 4]),
    first=[
        ("overwritten, not added", "scatter_add", "scatter_set"),
        ("off by one", "(5, i, g)", "(5, (i + 1) % 5, g)"),
        ("last row dropped", "(5, i, g)", "(5, i[:-1], g[:-1])"),
        ("columns swapped", "(5, i, g)", "(5, i, lib.m.flip(g, (1,)))"),
    ],
    second=[("gradient cut off", "(5, i, g)", "(5, i, lib.detach(g))")],
)
def lookup(lib):
    return rule(lib, lambda table, i: table[i], lambda g, table, i: (lib.scatter_add(5, i, g), None))


@base(
    regular(3),
    real(3),
    first=[
        ("taken for symmetric", "(a + a.T)", "(2 * a)"),
        ("diagonal only", "lib.m.outer(x, x)", "lib.m.diag(x * x)"),
        ("factor 1.001", "lib.m.outer(x, x)", "1.001 * lib.m.outer(x, x)"),
        ("factor 0.999", "(a + a.T) @ x", "(a + a.T) @ x * 0.999"),
    ],
    second=[
        ("matrix cut off", "(a + a.T)", "lib.detach(a + a.T)"),
        ("half of the vector cut off", "lib.m.outer(x, x)", "lib.m.outer(x, lib.detach(x))"),
    ],
)
def quadratic_form(lib):
    return rule(lib, lambda a, x: x @ a @ x, lambda g, a, x: (g * lib.m.outer(x, x), g * (a + a.T) @ x))


@base(
    regular(3),
    real(3),
    first=[
        ("not transposed", "solve(a.T, g)", "solve(a, g)"),
        ("wrong sign", "-lib.m.outer", "lib.m.outer"),
        ("swapped", "outer(u, y)", "outer(y, u)"),
        ("wrong off the diagonal", "-lib.m.outer(u, y)", "-lib.m.diag(u * y)"),
        ("input for result", "outer(u, y)", "outer(u, b)"),
    ],
    second=[("result cut off", "outer(u, y)", "outer(u, lib.detach(y))")],
)
def solve(lib):
    def backward(g, a, b, y):
        u = lib.m.linalg.solve(a.T, g)
        return -lib.m.outer(u, y), u

    return rule(lib, lib.m.linalg.solve, backward, lambda inputs, output: (*inputs, output))


@base(
    complex_(3),
    complex_(3),
    first=[
        ("missing conjugate", "lib.m.conj(2 * z * w)", "2 * z * w"),
        ("missing conjugate of one factor", "lib.m.conj(2 * z * w)", "2 * lib.m.conj(z) * w"),
        ("missing conjugate", "lib.m.conj(z * z)", "z * z"),
        ("conjugated gradient", "g * lib.m.conj(z * z)", "lib.m.conj(g * z * z)"),
        ("imaginary part dropped", "lib.m.conj(z * z)", "(z * z).real"),
        ("factor 1.001", "2 * z", "2.002 * z"),
    ],
    second=[
        ("saved input cut off", "z * z)", "z * lib.detach(z))"),
        ("gradient cut off", "g * lib.m.conj(2", "lib.detach(g) * lib.m.conj(2"),
    ],
)
def complex_product(lib):
    def backward(g, z, w):
        return g * lib.m.conj(2 * z * w), g * lib.m.conj(z * z)

    return rule(lib, lambda z, w: z**2 * w, backward)


@base(
    complex_(3, 3),
    complex_(3, 3),
    first=[
        ("missing conjugate", "lib.m.conj(b.T)", "b.T"),
        ("missing transpose", "lib.m.conj(b.T)", "lib.m.conj(b)"),
        ("missing conjugate", "lib.m.conj(a.T)", "a.T"),
        ("swapped factors", "lib.m.conj(a.T) @ g", "g @ lib.m.conj(a.T)"),
    ],
    second=[("saved matrix cut off", "lib.m.conj(a.T)", "lib.m.conj(lib.detach(a).T)")],
)
def complex_matmul(lib):
    return rule(lib, lambda a, b: a @ b, lambda g, a, b: (g @ lib.m.conj(b.T), lib.m.conj(a.T) @ g))


@base(
    complex_(4),
    first=[
        ("conjugated", "g * z", "g * lib.m.conj(z)"),
        ("dropped factor", " / lib.m.abs(z)\n", "\n"),
        ("of the square", "g * z / lib.m.abs(z)", "2 * g * z"),
    ],
    second=[("modulus cut off", "/ lib.m.abs(z)", "/ lib.m.abs(lib.detach(z))")],
)
def modulus(lib):
    def backward(g, z):
        return g * z / lib.m.abs(z)

    return rule(lib, lib.m.abs, backward)


@base(
    positive(3),
    real(3),
    first=[
        ("missing conjugate", "lib.m.conj(turn(t))", "turn(t)"),
        ("imaginary part for the real one", "1j * r * turn(t))).real", "1j * r * turn(t))).imag"),
        ("dropped factor", "1j * r * turn", "1j * turn"),
    ],
    second=[("angle cut off", "lib.m.conj(turn(t))", "lib.m.conj(turn(lib.detach(t)))")],
)
def polar(lib):
    def turn(t):
        return lib.m.exp(1j * t)

    def backward(g, r, t):
        return (g * lib.m.conj(turn(t))).real, (g * lib.m.conj(1j * r * turn(t))).real

    return rule(lib, lambda r, t: r * turn(t), backward)


@base(
    real(3),
    real(3),
    first=[
        ("dropped term", " - h * lib.m.sin(x)", ""),
        ("swapped gradients", "def backward(g, h, x, y)", "def backward(h, g, x, y)"),
        ("gradient of the second output ignored", "+ 2 * h * y", "+ 0 * h * y"),
        ("wrong saved tensor", "2 * h * y", "2 * h * x"),
        ("wrong in the last row", "g * lib.m.sin(x)", "lib.m.where(spot(lib, 3), 0.99 * g, g) * lib.m.sin(x)"),
    ],
    second=[
        ("saved input cut off", "2 * h * y", "2 * h * lib.detach(y)"),
        ("cosine cut off", "lib.m.cos(x) * y", "lib.m.cos(lib.detach(x)) * y"),
    ],
)
def two_outputs(lib):
    def forward(x, y):
        return y * lib.m.sin(x), lib.m.cos(x) + y**2

    def backward(g, h, x, y):
        return g * lib.m.cos(x) * y - h * lib.m.sin(x), g * lib.m.sin(x) + 2 * h * y

    return rule(lib, forward, backward)


@base(
    distinct(5),
    first=[
        ("the wrong permutation", "g[lib.m.argsort(order)]", "g[order]"),
        ("not permuted", "g[lib.m.argsort(order)]", "g"),
    ],
    second=[],
)
def sort(lib):
    def backward(g, x):
        order = lib.m.argsort(x)
        return g[lib.m.argsort(order)]

    return rule(lib, lambda x: x[lib.m.argsort(x)], backward)


@base(
    distinct(8),
    first=[
        ("wrong for large values", "lib.m.sign(x)", "x"),
        ("wrong sign for large values", "lib.m.sign(x)", "1.0"),
        ("wrong threshold", "> 0.5, lib.m.sign", "> 0.75, lib.m.sign"),
    ],
    second=[("saved input cut off", ", 2 * x)", ", 2 * lib.detach(x))")],
)
def huber(lib):
    def forward(x):
        return lib.m.where(lib.m.abs(x) > 0.5, lib.m.abs(x) - 0.25, x * x)

    def backward(g, x):
        return g * lib.m.where(lib.m.abs(x) > 0.5, lib.m.sign(x), 2 * x)

    return rule(lib, forward, backward)


@base(
    positive(3, 4),
    first=[
        ("not divided", "g * x / y", "g * x"),
        ("divided by the square", "g * x / y", "g * x / y**2"),
        ("eps in backward only", "g * x / y", "g * x / (y + 1e-2)"),
    ],
    second=[
        ("norm cut off", "g * x / y", "g * x / lib.detach(y)"),
        ("saved input cut off", "g * x / y", "g * lib.detach(x) / y"),
    ],
)
def norm(lib):
    def backward(g, x, y):
        return g * x / y

    return rule(lib, lambda x: lib.m.sqrt((x * x).sum()), backward, lambda inputs, output: (*inputs, output))


@base(
    real(3),
    real(3),
    first=[
        ("undefined gradient taken for ones", "0 * x if g is None", "y if g is None"),
        ("undefined gradient forgotten", "if h is not None", "if h is not None and g is not None"),
        ("gives up on an undefined one", "grad_y = 0", "if g is None: return None, None\n        grad_y = 0"),
        ("gives up on an undefined one", "grad_y = 0", "if h is None: return None, None\n        grad_y = 0"),
    ],
    second=[("saved input cut off", "h * lib.m.cos(x)", "h * lib.m.cos(lib.detach(x))")],
)
def undefined_gradients(lib):
    def backward(g, h, x, y):
        grad_x = 0 * x if g is None else g * y
        grad_y = 0 * y if g is None else g * x
        if h is not None:
            grad_x = grad_x + h * lib.m.cos(x)
        return grad_x, grad_y

    return rule(lib, lambda x, y: (x * y, lib.m.sin(x)), backward, materialize=False)


# torch compares within a relative 1e-3, and looks for no gradient that does not depend on an input.
MISSED_BY_TORCH = {
    "tanh: factor 1.001",
    "tanh: factor 0.999",
    "linear: factor 1.001",
    "linear: gradient cut off",
    "quadratic_form: factor 1.001",
    "quadratic_form: factor 0.999",
    "complex_product: factor 1.001",
}
