"""torch's own database of custom Functions, as jaxfn Functions, compared with torch's classes run live.

The originals are the tests' subjects in torch (`torch.testing._internal.autograd_function_db`). Methods that use only
what JAX has too run as torch wrote them; the others are written again. Those that compute with NumPy do so here by
`jax.pure_callback`, so that JAX can neither differentiate nor batch their insides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.support.torch_internals import torch_internal

torch = pytest.importorskip("torch")


database = torch_internal("autograd_function_db")


pytestmark = [
    pytest.mark.usefixtures("double_precision"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
]


def on_host(f: Callable[..., Any], *like: Any) -> Callable[..., Any]:
    """NumPy code, called from a JAX program; it cannot be batched."""

    def call(*args: Any) -> Any:
        return jax.pure_callback(lambda *a: tuple(map(np.asarray, f(*map(np.asarray, a)))), like, *args)

    return call


def same(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


# What the code of torch's classes finds under its global names: JAX's, and the ported classes.
GLOBALS: dict[str, Any] = {
    "torch": SimpleNamespace(
        argsort=lambda x, dim=None, axis=None: jnp.argsort(x, axis=dim if axis is None else axis),
        take_along_dim=lambda x, indices, dim: jnp.take_along_axis(x, indices, dim),
    )
}


def port(name: str, **methods: Callable[..., Any]) -> type[jaxfn.Function]:
    """torch's class as a jaxfn Function, with the very code of its methods, but for these."""
    attributes: dict[str, Any] = {key: staticmethod(method) for key, method in methods.items()}
    for key, value in vars(getattr(database, name)).items():
        if isinstance(value, staticmethod) and key not in methods:
            code = value.__func__
            attributes[key] = staticmethod(FunctionType(code.__code__, GLOBALS, key, code.__defaults__))
        elif key in ("generate_vmap_rule", "scale"):
            attributes[key] = value
    GLOBALS[name] = type(name, (jaxfn.Function,), attributes)
    return GLOBALS[name]


def _mul(x, y):
    shape = jax.ShapeDtypeStruct(jnp.broadcast_shapes(x.shape, y.shape), x.dtype)
    return on_host(lambda x, y: (x * y,), shape)(x, y)[0]


def _vmap_of_mul(info, in_dims, x, y):
    x, y = (a[..., None] if dim is None else jnp.moveaxis(a, dim, -1) for a, dim in zip((x, y), in_dims, strict=True))
    return jnp.moveaxis(NumpyMul.apply(x, y), -1, 0), 0


NumpyMul = port("NumpyMul", forward=_mul, vmap=_vmap_of_mul)
MulGenVmap = port("MulGenVmap")


def _cube(x):
    return on_host(lambda x: (x**3, 3 * x**2), same(x), same(x))(x)


NumpyCube = port("NumpyCube", forward=_cube)
CubeGenVmap = port("CubeGenVmap")  # its backward is not linear


def _saves_its_output(ctx, inputs, output):
    _, ctx.x = output


NumpyCubeNotComposable = port(
    "NumpyCubeNotComposable",
    forward=lambda x: (_cube(x)[0], x),
    setup_context=_saves_its_output,
    backward=jaxfn.once_differentiable(lambda ctx, grad_output, grad_saved: 3 * ctx.x**2),
)


def _saves_the_new_value(ctx, inputs, output):
    ctx.save_for_backward(output)
    ctx.save_for_forward(output)


NumpyExp_ = port(  # torch's works in place; here the new value is returned
    "NumpyExp_",
    forward=lambda x: on_host(lambda x: (np.exp(x),), same(x))(x)[0],
    setup_context=_saves_the_new_value,
    vmap=lambda info, in_dims, x: (NumpyExp_.apply(x), in_dims[0]),
    jvp=lambda ctx, tangent: tangent * ctx.saved_tensors[0],
)


def _take(x, ind, ind_inv, dim):
    shape = jax.ShapeDtypeStruct(ind.shape, x.dtype)
    return on_host(lambda x, ind: (np.take_along_axis(x, ind, dim),), shape)(x, ind)[0]


def _vmap_of_take(info, in_dims, x, ind, ind_inv, dim):
    logical = x.ndim - (in_dims[0] is not None)
    x, ind, ind_inv = (
        jnp.broadcast_to(a, (info.batch_size, *a.shape)) if axis is None else jnp.moveaxis(a, axis, 0)
        for a, axis in zip((x, ind, ind_inv), in_dims[:3], strict=True)
    )
    return NumpyTake.apply(x, ind, ind_inv, (dim if dim >= 0 else dim + logical) + 1), 0


NumpyTake = port("NumpyTake", forward=_take, vmap=_vmap_of_take)
TakeGenVmap = port("TakeGenVmap")


def _sort(x, dim):
    """torch's Function returns its input unchanged, not sorted, and the order; so does this one."""
    index = jax.ShapeDtypeStruct(x.shape, np.int64)

    def sort(x):
        ind = np.argsort(x, axis=dim)
        return x, ind, np.argsort(ind, axis=dim)

    return on_host(sort, same(x), index, index)(x)


def _vmap_of_sort(info, in_dims, x, dim):
    x = jnp.moveaxis(x, in_dims[0], 0)
    return NumpySort.apply(x, (dim if dim >= 0 else dim + x.ndim - 1) + 1), (0, 0, 0)


NumpySort = port("NumpySort", forward=_sort, vmap=_vmap_of_sort)
SortGenVmap = port("SortGenVmap")


def _gradient_of_select(ctx, grad_output):
    return jnp.zeros(ctx.x_shape, grad_output.dtype).at[ctx.idx].set(grad_output), None


SelectGenVmap = port("SelectGenVmap", backward=_gradient_of_select)
Select = port(
    "Select",
    backward=_gradient_of_select,
    vmap=lambda info, in_dims, x, idx: (Select.apply(jnp.moveaxis(x, in_dims[0], 1), idx), 0),
)
ForwardHasDefaultArgs = port(
    "ForwardHasDefaultArgs",
    backward=_gradient_of_select,
    vmap=lambda info, in_dims, x, idx: (ForwardHasDefaultArgs.apply(jnp.moveaxis(x, in_dims[0], 1), idx), 0),
)
ScaleGradGenVmap = port("ScaleGradGenVmap", forward=lambda x: x * 1)
ZeroGradientsGenVmap = port(
    "ZeroGradientsGenVmap",
    forward=lambda x, y: (x * 1, y * 1),
    backward=lambda ctx, gx, gy: (jnp.zeros((3, 4, *gx.shape), gx.dtype), jnp.zeros_like(gy)),  # summed to the shape
    jvp=lambda ctx, tx, ty: (jnp.zeros_like(tx), jnp.zeros_like(ty)),
)


@dataclass(frozen=True)
class Entry:
    """One Function of the database.

    Attributes:
      name: the torch class's name.
      apply: ours.
      shapes: of the floating arguments.
      rest: the other arguments.
      orders: how often torch's can be differentiated in reverse.
      in_torch: how torch's is called, where that is not its `apply`.
    """

    name: str
    apply: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    rest: tuple[Any, ...] = ()
    orders: int = 2
    has_jvp: bool = True
    has_vmap: bool = True
    in_torch: Callable[..., Any] | None = None

    def __str__(self) -> str:
        return self.name

    def args(self, batch: tuple[int, ...] = ()) -> list[np.ndarray]:
        generator = np.random.default_rng(0)
        return [generator.uniform(0.8, 2, (*batch, *shape)) for shape in self.shapes]

    def ours(self) -> Callable[..., list[Any]]:
        rest = [jnp.asarray(r) if isinstance(r, np.ndarray) else r for r in self.rest]
        return lambda *args: _listed(self.apply(*args, *rest))

    def theirs(self) -> Callable[..., list[Any]]:
        rest = [torch.tensor(r) if isinstance(r, np.ndarray) else r for r in self.rest]
        apply = self.in_torch or getattr(database, self.name).apply
        return lambda *args: _listed(apply(*args, *rest))


def _listed(outputs: Any) -> list[Any]:
    return list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]


_INDEX = np.argsort(np.random.default_rng(1).normal(size=(3, 5)), axis=1)
_INVERSE = np.argsort(_INDEX, axis=1)

ENTRIES = [
    Entry("NumpyCube", NumpyCube.apply, ((1,),)),
    Entry("CubeGenVmap", CubeGenVmap.apply, ((1,),)),
    Entry(
        "NumpyCubeNotComposable", lambda x: NumpyCubeNotComposable.apply(x)[0], ((1,),), orders=1, has_jvp=False,
        has_vmap=False, in_torch=lambda x: database.NumpyCubeNotComposable.apply(x)[0],
    ),
    Entry("NumpyExp_", NumpyExp_.apply, ((1,),), in_torch=lambda x: database.NumpyExp_.apply(x.clone())),
    Entry("NumpyMul", NumpyMul.apply, ((4,), (3, 4))),
    Entry("MulGenVmap", MulGenVmap.apply, ((4,), (3, 4))),
    Entry("NumpySort", NumpySort.apply, ((3, 5),), (1,)),
    Entry("SortGenVmap", SortGenVmap.apply, ((3, 5),), (1,)),
    Entry("NumpyTake", NumpyTake.apply, ((3, 5),), (_INDEX, _INVERSE, 1)),
    Entry("TakeGenVmap", TakeGenVmap.apply, ((3, 5),), (_INDEX, _INVERSE, 1)),
    Entry("Select", Select.apply, ((3, 5),), (2,)),
    Entry("SelectGenVmap", SelectGenVmap.apply, ((3, 5),), (2,)),
    Entry("ScaleGradGenVmap", ScaleGradGenVmap.apply, ((1,),)),
    Entry("ZeroGradientsGenVmap", ZeroGradientsGenVmap.apply, ((4,), (3, 4))),
    Entry("ForwardHasDefaultArgs", ForwardHasDefaultArgs.apply, ((3, 5),)),
]  # fmt: skip


def compare(ours: Any, theirs: Any) -> None:
    ours, theirs = jax.tree.leaves(ours), jax.tree.leaves(theirs)
    for a, b in zip(ours, theirs, strict=True):
        b = b.detach().numpy() if isinstance(b, torch.Tensor) else b
        assert np.shape(a) == np.shape(b)
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def is_floating(x: Any) -> bool:
    return "float" in str(x.dtype)


def loss_of(f: Callable[..., list[Any]]) -> Callable[..., Any]:
    """Nonlinear in every floating output, for either library."""
    return lambda *args: sum(((i + 2.0) * y * y * y).sum() for i, y in enumerate(f(*args)) if is_floating(y))


def floating(f: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    return lambda *args: [y for y in f(*args) if is_floating(y)]


def test_the_whole_database_is_here():
    classes = {
        name
        for name, value in vars(database).items()
        if isinstance(value, type) and issubclass(value, torch.autograd.Function)
    }
    assert classes == {entry.name for entry in ENTRIES}


def torch_gradients(f: Callable[..., Any], args: Sequence[Any], orders: int) -> list[Any]:
    """Gradients of the loss, then those of the gradients' squares; zeros where torch has none."""
    tensors = [a.detach().requires_grad_() for a in args]
    target = loss_of(f)(*tensors)
    found: list[Any] = []
    for order in range(orders):
        if not target.requires_grad:
            found.append([torch.zeros_like(t) for t in tensors])
            continue
        gradients = torch.autograd.grad(
            target, tensors, create_graph=order + 1 < orders, allow_unused=True, materialize_grads=True
        )
        found.append(list(gradients))
        target = sum((g * g).sum() for g in gradients)
    return found


def jax_gradients(f: Callable[..., Any], args: Sequence[Any], orders: int) -> list[Any]:
    target, found = loss_of(f), []
    for _ in range(orders):
        gradient = jax.grad(target, every(args))
        found.append(list(gradient(*args)))
        target = (lambda gradient: lambda *a: sum((g * g).sum() for g in gradient(*a)))(gradient)
    return found


def every(args: Sequence[Any]) -> tuple[int, ...]:
    return tuple(range(len(args)))


def directions(args: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(a.cos() if isinstance(a, torch.Tensor) else jnp.cos(a) for a in args)


def tuples(f: Callable[..., list[Any]]) -> Callable[..., tuple[Any, ...]]:
    """torch.func wants tuples."""
    return lambda *args: tuple(f(*args))


# What is compared: in JAX, in torch; of an entry and its arguments, or its batch of arguments.
SINGLE = {
    "outputs": (lambda e, *a: e.ours()(*a), lambda e, *a: e.theirs()(*a)),
    "gradients of every order": (
        lambda e, *a: jax_gradients(e.ours(), a, e.orders),
        lambda e, *a: torch_gradients(e.theirs(), a, e.orders),
    ),
}
FORWARD_MODE = {
    "jvp": (
        lambda e, *a: jax.jvp(floating(e.ours()), a, directions(a))[1],
        lambda e, *a: torch.func.jvp(tuples(floating(e.theirs())), a, directions(a))[1],
    ),
    "jvp of grad": (
        lambda e, *a: jax.jvp(jax.grad(loss_of(e.ours()), every(a)), a, directions(a))[1],
        lambda e, *a: torch.func.jvp(torch.func.grad(loss_of(e.theirs()), every(a)), a, directions(a))[1],
    ),
}
BATCHED = {
    "vmap": (lambda e, *a: jax.vmap(e.ours())(*a), lambda e, *a: torch.vmap(tuples(e.theirs()))(*a)),
    "vmap of grad": (
        lambda e, *a: jax.vmap(jax.grad(loss_of(e.ours()), every(a)))(*a),
        lambda e, *a: torch.vmap(torch.func.grad(loss_of(e.theirs()), every(a)))(*a),
    ),
    "gradients of vmap": (
        lambda e, *a: jax_gradients(jax.vmap(e.ours()), a, e.orders),
        lambda e, *a: torch_gradients(torch.vmap(tuples(e.theirs())), a, e.orders),
    ),
}


@pytest.mark.parametrize(
    ("way", "entry"),
    [(way, entry) for way in SINGLE for entry in ENTRIES]
    + [(way, entry) for way in FORWARD_MODE for entry in ENTRIES if entry.has_jvp]
    + [(way, entry) for way in BATCHED for entry in ENTRIES if entry.has_vmap],
    ids=str,
)
def test_as_torch(way, entry):
    """All under `jax.jit`; what is neither mapped nor in forward mode eagerly too."""
    ours, theirs = (SINGLE | FORWARD_MODE | BATCHED)[way]
    args = entry.args((2,) if way in BATCHED else ())
    expected = theirs(entry, *map(torch.tensor, args))
    compare(jax.jit(functools.partial(ours, entry))(*args), expected)
    if way in SINGLE:
        compare(ours(entry, *args), expected)


def test_what_torch_does_not_differentiate_twice_raises():
    (entry,) = (e for e in ENTRIES if e.orders == 1)
    x = torch.tensor(entry.args()[0], requires_grad=True)
    (gradient,) = torch.autograd.grad(loss_of(entry.theirs())(x), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()
    with pytest.raises(RuntimeError, match="differentiate twice"):
        jax_gradients(entry.ours(), entry.args(), 2)
