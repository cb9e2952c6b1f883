"""H1, D4: a torch Function's own `jvp` through from_torch, next to torch's forward mode."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.support.beside_torch import assert_same_as_torch
from tests.support.marks import cells, row

torch = pytest.importorskip("torch")
# torch's own forward mode compiles something else with it.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script")
forward_ad = torch.autograd.forward_ad


class TorchCombined(torch.autograd.Function):
    """Its jvp is not the derivative, so that a mix-up shows."""

    @staticmethod
    def forward(ctx, x, power, w):
        ctx.power = power
        ctx.save_for_backward(x, w)
        ctx.save_for_forward(w, x.exp())
        sign = x.sign()
        ctx.mark_non_differentiable(sign)
        return x**power * w, sign

    @staticmethod
    def backward(ctx, grad_output, _):
        x, w = ctx.saved_tensors
        return grad_output * w * ctx.power, None, grad_output * x

    @staticmethod
    def jvp(ctx, x_t, power_t, w_t):
        assert power_t is None
        w, exp = ctx.saved_tensors
        return 5 * x_t * exp + w_t * w * ctx.power, None


class TorchSeparate(torch.autograd.Function):
    @staticmethod
    def forward(x, y=None):
        return x.sin() if y is None else x.sin() * y

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, grad_output):
        x, y = ctx.saved_tensors
        return grad_output * x.cos() * (1 if y is None else y), None if y is None else grad_output * x.sin()

    @staticmethod
    def jvp(ctx, x_t, y_t):
        x, _ = ctx.saved_tensors
        tangent = 0
        if x_t is not None:
            tangent = tangent + 7 * x_t * x.cos()
        if y_t is not None:
            tangent = tangent + y_t * x.sin()
        return tangent


X, W = np.array([0.5, -1.0, 2.0], np.float32), np.array([3.0, 1.0, -2.0], np.float32)
DX, DW = np.array([1.0, 2.0, 0.5], np.float32), np.array([-1.0, 0.25, 1.0], np.float32)


def by_torch(function, args, tangents):
    """The first output and its tangent, by torch's forward mode; a tangent may be `None`."""
    with forward_ad.dual_level():
        tensors = [torch.from_numpy(a) if isinstance(a, np.ndarray) else a for a in args]
        duals = [
            x if t is None else forward_ad.make_dual(x, torch.from_numpy(t))
            for x, t in zip(tensors, tangents, strict=True)
        ]
        primal, tangent = forward_ad.unpack_dual(jax.tree.leaves(function.apply(*duals))[0])
    return primal.numpy(), tangent.numpy()


@row("H1", "D4", "B9")
@cells(
    "function, which, jit",
    [
        (TorchCombined, (0, 1), True),
        (TorchCombined, (0,), False),
        (TorchCombined, (1,), True),
        (TorchSeparate, (0, 1), False),
        (TorchSeparate, (0,), True),
        (TorchSeparate, (1,), False),
    ],
    [TorchCombined, TorchSeparate],
    [(0, 1), (0,), (1,)],
    [False, True],
    ids=str,
)
def test_jvp_as_torch(function, which, jit):
    args, positions = ([X, 3, W], (0, 2)) if function is TorchCombined else ([X, W], (0, 1))
    chosen = [positions[i] for i in which]
    tangents = [{0: DX, positions[1]: DW}[i] if i in chosen else None for i in range(len(args))]
    apply = jaxfn.from_torch(function).apply

    def of_chosen(*values):
        filled = dict(enumerate(args)) | dict(zip(chosen, values, strict=True))
        return jax.tree.leaves(apply(*filled.values()))[0]

    def push(values, directions):
        return jax.jvp(of_chosen, values, directions)

    ours = (jax.jit(push) if jit else push)(tuple(args[i] for i in chosen), tuple(tangents[i] for i in chosen))
    for got, expected in zip(ours, by_torch(function, args, tangents), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6)


@row("H1", "D4")
def test_reverse_mode_still_uses_backward():
    ours = jaxfn.from_torch(TorchCombined).apply
    assert_same_as_torch(lambda x, w: ours(x, 3, w)[0], lambda x, w: TorchCombined.apply(x, 3, w)[0], [X, W])


@row("H1", "D7")
def test_hessian_by_both_rules():
    function = jaxfn.from_torch(TorchSeparate)
    # Forward over reverse: the derivative of backward's own operations, in forward mode.
    hessian = jax.hessian(lambda x: function.apply(x).sum())(X)
    np.testing.assert_allclose(hessian, -np.diag(np.sin(X)), rtol=1e-5, atol=1e-6)
    jacobian = jax.vmap(lambda t: jax.jvp(function.apply, (jnp.asarray(X),), (t,))[1])(jnp.eye(3))
    np.testing.assert_allclose(jacobian, 7 * np.diag(np.cos(X)), rtol=1e-6, atol=1e-6)
