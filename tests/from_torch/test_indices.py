"""Row H13: indices out of range raise in eager calls; in compiled ones they give NaN, or nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.support.marks import row, slow

torch = pytest.importorskip("torch")

from tests.support.torch_code import rule  # noqa: E402

F = torch.nn.functional
X = np.array([[1, 2.5, 3.25], [4, 5.75, 6]], np.float32)
OFFSETS, WEIGHTS = torch.tensor([0]), torch.tensor([1.0, 2.0, 3.0])

# The functions read `x` at an index `i`, an array of one element.
READS: dict[str, Callable[[Any, Any], Any]] = {
    "gather": lambda x, i: x.gather(1, i.expand(2, 1)),
    "index_select": lambda x, i: x.index_select(1, i),
    "x[:, i]": lambda x, i: x[:, i],
    "x[i, i]": lambda x, i: x[:, :2][i, i],
    "x[:, one]": lambda x, i: x[:, i[0]],
    "take": lambda x, i: x[0].take(i),
    "embedding": lambda x, i: F.embedding(i, x.T),
    "embedding_max_norm": lambda x, i: F.embedding(i, x.T.clone(), max_norm=1.0),
    "embedding_bag": lambda x, i: F.embedding_bag(i, x.T, OFFSETS),
    "embedding_bag_max": lambda x, i: F.embedding_bag(i, x.T, OFFSETS, mode="max"),
    "cross_entropy": lambda x, i: F.cross_entropy(x[:1], i),
    "cross_entropy_weight": lambda x, i: F.cross_entropy(x[:1], i, weight=WEIGHTS),
    "cross_entropy_smooth": lambda x, i: F.cross_entropy(x[:1], i, label_smoothing=0.1),
    "nll_loss": lambda x, i: F.nll_loss(x, i.expand(2), reduction="none"),
    "nll_loss_2d": lambda x, i: F.nll_loss(x.reshape(1, 3, 2, 1), i.expand(1, 2, 1)),
    "multi_margin_loss": lambda x, i: F.multi_margin_loss(x[:1], i),
    "one_hot": lambda x, i: (x[0] * F.one_hot(i, 3)).where(F.one_hot(i, 3) >= 0, torch.nan),
    "half": lambda x, i: x.bfloat16().gather(1, i.expand(2, 1)).float(),
}
WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "scatter": lambda x, i: x.scatter(1, i.expand(2, 1), 9.0),
    "scatter_add": lambda x, i: x.scatter_add(1, i.expand(2, 1), x[:, :1]),
    "scatter_reduce": lambda x, i: x.scatter_reduce(1, i.expand(2, 1), x[:, 1:2] + 0.5, "amax"),
    "index_add": lambda x, i: x.index_add(1, i, x[:, :1]),
    "index_copy": lambda x, i: x.index_copy(1, i, x[:, :1]),
    "index_fill": lambda x, i: x.index_fill(1, i, 9.0),
    "index_put": lambda x, i: x.index_put((torch.zeros(1, dtype=torch.long), i), torch.tensor([9.0])),
    "index_put_add": lambda x, i: x.index_put((torch.arange(2), i), x[:, 0], accumulate=True),
    "put": lambda x, i: x[0].clone().put_(i, torch.tensor([9.0])),
}
# Negative indices count from the end here, as in torch.
WRAPS = ("x[:, i]", "x[i, i]", "x[:, one]", "take", "index_fill", "index_put", "index_put_add", "put")


def torch_result(function: Callable[..., Any], index: int) -> tuple[Any, Any]:
    """Value and gradient by `x` of the sum; or an exception instead of both."""
    x = torch.tensor(X, requires_grad=True)
    value = function(x, torch.tensor([index]))
    (gradient,) = torch.autograd.grad(value.sum(), x)
    return value.detach().numpy(), gradient.numpy()


def value_and_gradient(function: Callable[..., Any], x: Any, i: Any) -> tuple[Any, Any]:
    value, pull = jax.vjp(lambda x: function(x, i), x)
    return value, *pull(jnp.ones_like(value))


@row("H13")
@pytest.mark.parametrize("name", [*READS, *WRITES])
def test_indices_in_range_are_torchs_and_others_are_never_another_element(name):
    function = {**READS, **WRITES}[name]
    converted = jaxfn.from_torch(function)
    gradient = jax.grad(lambda x, i: converted(x, i).sum())
    compiled = jax.jit(lambda x, i: value_and_gradient(converted, x, i))
    for index in (1, -2) if name in WRAPS else (0, 1):
        expected = torch_result(function, index)
        for got, want in zip(compiled(X, jnp.array([index])), expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(converted(X, jnp.array([index])), expected[0], rtol=1e-6, atol=1e-6)
    for index in (7, -9) if name in WRAPS else (7, -1):
        with pytest.raises((IndexError, RuntimeError)):
            torch_result(function, index)
        for eager in (converted, gradient):
            with pytest.raises(IndexError, match=rf"index {index} is out of range for a dimension .*test_indices"):
                eager(X, jnp.array([index]))
        value, slope = compiled(X, jnp.array([index]))
        if name in READS:
            assert np.isnan(value).all()
        else:
            np.testing.assert_array_equal(value, X[0] if name == "put" else X)
            np.testing.assert_array_equal(slope, [[1] * 3, [name != "put"] * 3])


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.int16, jnp.int8])
@row("H13")
def test_integers_become_the_smallest_one(dtype):
    function = jax.jit(jaxfn.from_torch(lambda x, i: x[i]))
    np.testing.assert_array_equal(function(X[0].astype(dtype), jnp.array([1, 7])), [2, jnp.iinfo(dtype).min])


@row("H13")
def test_ignored_labels_do_not_raise_and_a_wrong_one_makes_the_mean_nan():
    def loss(x, labels):
        return F.cross_entropy(x, labels, ignore_index=-1, reduction="none") + F.cross_entropy(
            x, labels.where(labels >= 0, -100)
        )

    labels = np.array([-1, 2])
    expected = loss(torch.tensor(X), torch.tensor(labels))
    compiled = jax.jit(jaxfn.from_torch(loss))
    for call in (jaxfn.from_torch(loss), compiled):
        np.testing.assert_allclose(call(X, labels), expected, rtol=1e-6)
    assert np.isnan(compiled(X, jnp.array([0, 3]))).all() and np.isfinite(compiled(X, jnp.array([0, 2]))).all()


@row("H13")
def test_a_module_says_which_index_and_line():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(4, 2)

        def forward(self, i):
            return self.table(i + 1)

    net = jaxfn.from_torch(Model())
    with pytest.raises(IndexError, match=r"Model\.forward: index 4 .* size 4, at .*self\.table\(i \+ 1\)"):
        net(jnp.array([1, 3]))
    with pytest.raises(IndexError):
        jax.vmap(net)(jnp.array([[1], [3]]))
    compiled, _ = jax.jit(net.apply)(net.parameters, net.buffers, jnp.array([1, 3]))
    assert np.isnan(compiled).tolist() == [[False] * 2, [True] * 2]


@row("H13")
def test_a_function_that_is_applied_eagerly_raises_too():
    Lookup = rule(
        lambda table, i: table[i],
        lambda g, table, i: (g.new_zeros(len(table), g.shape[1]).index_add(0, i, g), None),
        name="Lookup",
    )

    lookup = jaxfn.from_torch(Lookup).apply
    with pytest.raises(IndexError, match=r"Lookup\.forward: index 2 .* size 2"):
        lookup(X, jnp.array([0, 2]))
    assert np.isnan(jax.jit(lookup)(X, jnp.array([0, 2]))[1]).all()
    np.testing.assert_array_equal(
        jax.jit(jax.grad(lambda x: lookup(x, jnp.array([0, 2])).sum()))(X), [[1] * 3, [0] * 3]
    )


@row("H13")
def test_replacements_of_the_user_see_the_indices_unchecked():
    converted = jaxfn.from_torch(
        lambda x, i: F.embedding(i, x), ops={torch.ops.aten.embedding: lambda w, i, *_: jnp.take(w, i % 2, 0)}
    )
    np.testing.assert_array_equal(converted(X, jnp.array([5])), X[1:])


@row("H13")
def test_too_few_values_for_a_mask():
    def spread(x, mask, values):
        y = x.clone()
        y[mask] = values
        return y, x.masked_scatter(mask, values)

    converted = jaxfn.from_torch(spread)
    mask = X > 3.5
    for got, want in zip(converted(X, mask, X[0]), spread(*map(torch.tensor, (X, mask, X[0]))), strict=True):
        np.testing.assert_array_equal(got, want)
    for got in converted(X, mask, X[0, :2]):
        np.testing.assert_array_equal(got, [X[0], [1, 2.5, np.nan]])


@row("H13")
def test_repeats_that_are_not_the_output_size():
    converted = jaxfn.from_torch(lambda x, n: torch.repeat_interleave(x, n, output_size=4))
    np.testing.assert_array_equal(converted(X[0], jnp.array([1, 2, 1])), X[0][[0, 1, 1, 2]])
    with pytest.raises(IndexError):
        converted(X[0], jnp.array([1, 1, 1]))
    assert np.isnan(jax.jit(converted)(X[0], jnp.array([1, 2, 2]))).all()


@row("H13")
@slow
def test_padding_of_ctc_targets_may_be_anything():
    scores = torch.randn(5, 2, 3).log_softmax(-1)
    lengths = torch.tensor([5, 4]), torch.tensor([1, 2])
    converted = jaxfn.from_torch(lambda s, t: F.ctc_loss(s, t, *lengths, reduction="none"))
    tidy, untidy = jnp.array([[1, 0], [2, 1]]), jnp.array([[1, -7], [2, 1]])
    both = jax.jit(lambda s, t: value_and_gradient(converted, s, t))
    for got, want in zip(both(scores.numpy(), untidy), both(scores.numpy(), tidy), strict=True):
        np.testing.assert_array_equal(got, want)
    assert np.isnan(both(scores.numpy(), jnp.array([[3, 0], [2, 1]]))[0]).tolist() == [True, False]
