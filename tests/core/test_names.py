"""The names of a Function's operations in compiled programs, and so in profiles."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxfn
from tests.support.cases import function_of
from tests.support.contexts import CONTEXTS
from tests.support.marks import cells, row


@pytest.fixture(autouse=True)
def names_in_the_key_of_the_compilation_cache():
    """Or a program that differs in nothing but names may come from there."""
    before = jax.config.jax_compilation_cache_include_metadata_in_key
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    yield
    jax.config.update("jax_compilation_cache_include_metadata_in_key", before)


# Each method uses an operation that nothing else uses: forward sin, backward tanh, jvp exp, vmap cosh.


def reverse(saved, g):
    return jnp.tanh(saved[0]) * g


def of_intermediate(rules, name):
    return function_of(
        rules,
        lambda x: jnp.sin(x) * x,
        lambda saved, tangent: jnp.exp(saved[0]) * tangent,
        reverse,
        lambda args, _: (jnp.sin(args[0]),),
        name,
    )


class Batched(jaxfn.Function):
    @staticmethod
    def forward(x):
        return jnp.sin(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad_output):
        return jnp.tanh(ctx.saved_tensors[0]) * grad_output

    @staticmethod
    def vmap(info, in_dims, x):
        return jnp.cosh(x), in_dims[0]


@jaxfn.function
def decorated(ctx, x):
    ctx.save_for_backward(x)
    return jnp.sin(x)


@decorated.backward
def _(ctx, grad_output):
    return jnp.tanh(ctx.saved_tensors[0]) * grad_output


FUNCTIONS = {
    "Reverse": function_of("backward", jnp.sin, None, reverse, name="Reverse"),
    "Intermediate": of_intermediate("backward", "Intermediate"),
    "BothModes": of_intermediate("both", "BothModes"),
    "Derived": of_intermediate("generated", "Derived"),
    "Batched": Batched.apply,
    "decorated": decorated,
}
METHODS = {"sine": "forward", "tanh": "backward", "exponential": "jvp", "cosh": "vmap"}


def over_devices(f):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    return jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P("data"))


INSIDE = {
    "nothing": lambda f: f,
    **{name: CONTEXTS[name] for name in ("jit", "checkpoint", "scan", "cond")},
    "vmap": jax.vmap,
    "vmap over columns": lambda f: jax.vmap(f, in_axes=1, out_axes=1),
    "shard_map": over_devices,
}


def names_by_operation(f, x):
    """The `op_name` of every instruction that is one of `METHODS`, in the compiled program."""
    text = jax.jit(f).lower(x).compile().as_text()
    names: dict[str, set[str]] = {}
    for line in text.splitlines():
        name = re.search(r'op_name="([^"]*)"', line)
        operation = re.search(r"= \S+ (\w+)\(", line)
        if operation and operation[1] in METHODS:
            names.setdefault(operation[1], set()).add(name[1] if name else "")
        elif name and name[1].endswith("/cosh"):  # XLA has no such operation
            names.setdefault("cosh", set()).add(name[1])
    return names


def check(f, x, name, expected):
    found = names_by_operation(f, x)
    assert set(found) >= expected
    if "cosh" in found:
        del found["exponential"]  # by which XLA computes cosh
    for operation, names in found.items():
        assert all(f"{name}.{METHODS[operation]}" in n for n in names), (operation, names)


@row("K3")
@cells(
    "name, inside",
    [
        ("Reverse", "nothing"), ("Intermediate", "nothing"), ("Reverse", "jit"), ("BothModes", "checkpoint"),
        ("Derived", "scan"), ("decorated", "cond"), ("Intermediate", "vmap"), ("Batched", "vmap"),
        ("Batched", "vmap over columns"), ("Batched", "scan"), ("Reverse", "shard_map"),
    ],
    FUNCTIONS,
    INSIDE,
)  # fmt: skip
def test_operations_carry_the_name_of_their_function_and_method(name, inside):
    f = INSIDE[inside](FUNCTIONS[name])
    x = jnp.linspace(0.1, 0.9, 12).reshape(4, 3)
    is_batched = name == "Batched" and inside.startswith("vmap")
    check(f, x, name, {"cosh"} if is_batched else {"sine"})
    backward = {"tanh"} if name in ("Reverse", "Batched", "decorated") else {"tanh", "sine"}
    check(jax.grad(lambda x: (f(x) * x).sum()), x, name, {"tanh"} if is_batched else backward)


@row("K3")
@pytest.mark.parametrize("name", ["BothModes", "Derived"])
def test_operations_of_forward_mode_carry_the_name_of_the_method(name):
    x = jnp.linspace(0.1, 0.9, 5)
    pushed = {"exponential"} if name == "BothModes" else {"tanh"}
    check(lambda x: jax.jvp(FUNCTIONS[name], (x,), (x + 1,)), x, name, {"sine"} | pushed)


@row("K3")
@pytest.mark.parametrize("name", ["Reverse", "decorated"])
def test_operations_of_a_second_derivative_carry_the_name(name):
    # The derivative of tanh uses tanh again, and that of the rule sin: all of it belongs to backward.
    x = jnp.linspace(0.1, 0.9, 5)
    gradient = jax.grad(lambda x: FUNCTIONS[name](x).sum())
    check(jax.grad(lambda x: gradient(x).sum()), x, name, {"tanh"})


@row("K3")
def test_a_conversion_that_jaxfn_makes_of_a_gradient_belongs_to_backward():
    @jaxfn.function
    def scaled(ctx, x, w):
        ctx.save_for_backward(x)
        return x * w

    @scaled.backward
    def _(ctx, grad_output):
        return None, grad_output * ctx.saved_tensors[0]  # summed to the shape of w by jaxfn

    text = jax.jit(jax.grad(lambda w: scaled(jnp.ones((4, 3)), w).sum())).lower(jnp.ones(3)).as_text(debug_info=True)
    assert re.search(r'scaled\.backward\)*/reduce_sum"', text)


@row("K3")
def test_packing_belongs_to_forward_and_unpacking_to_backward():
    def pack(x):
        return jnp.cosh(x)

    def unpack(x):
        return jnp.sinh(x)

    with jaxfn.saved_tensors_hooks(pack, unpack):
        lowered = jax.jit(jax.grad(lambda x: FUNCTIONS["Reverse"](x).sum())).lower(jnp.ones(3))
    text = lowered.as_text(debug_info=True)
    assert re.search(r'Reverse\.forward\)*/cosh"', text)
    assert re.search(r'Reverse\.backward\)*/sinh"', text)


@row("K3")
def test_a_function_inside_another_carries_both_names():
    @jaxfn.function
    def outer(ctx, x):
        ctx.save_for_backward(x)
        return FUNCTIONS["Reverse"](x) * 2

    @outer.backward
    def _(ctx, grad_output):
        return grad_output

    names = names_by_operation(outer, jnp.ones(3))
    assert all("outer.forward" in n and "Reverse.forward" in n for n in names["sine"])
