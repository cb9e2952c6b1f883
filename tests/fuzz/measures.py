"""Measures of a program: values, and derivatives in every mode, as source."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Derived:
    """A function of the arguments.

    Attributes:
      source: an expression of `run`, the program, `loss`, a scalar of it, and `argnums`.
      is_forward: whether forward mode is used, which not every Function has.
      order: how often it differentiates.
    """

    source: str
    is_forward: bool
    order: int


MEASURES = {
    "value": Derived("run", False, 0),
    "grad": Derived("jax.grad(loss, argnums)", False, 1),
    "value_and_grad": Derived("jax.value_and_grad(loss, argnums)", False, 1),
    "grad of jit": Derived("jax.grad(lambda *args: loss_of(jax.jit(run)(*args)), argnums)", False, 1),
    "vjp": Derived("lambda *args: pulled_back(run, args, argnums)", False, 1),
    "jacrev": Derived("jax.jacrev(lambda *args: floats(run(*args)), argnums)", False, 1),
    "grad of grad": Derived(
        "jax.grad(lambda *args: loss_of(jax.grad(loss, argnums)(*args)), argnums)", False, 2
    ),
    "grad of jit of grad": Derived(
        "jax.grad(lambda *args: loss_of(jax.jit(jax.grad(loss, argnums))(*args)), argnums)", False, 2
    ),
    "jvp": Derived("lambda *args: pushed_forward(run, args, argnums)", True, 1),
    "linearize": Derived("lambda *args: linearized(run, args, argnums)", True, 1),
    "jacfwd": Derived("jax.jacfwd(lambda *args: floats(run(*args)), argnums)", True, 1),
    "hessian": Derived("jax.hessian(loss, argnums)", True, 2),
    "grad of jacfwd": Derived(
        "jax.grad(lambda *args: loss_of(jax.jacfwd(loss, argnums)(*args)), argnums)", True, 2
    ),
}  # fmt: skip

LINEAR_MEASURES = ("value", "value_and_grad", "value_and_grad of jit")
_LINEAR = {
    "value": "linear_loss",
    "value_and_grad": "jax.value_and_grad(linear_loss)",
    "value_and_grad of jit": "jax.value_and_grad(jax.jit(linear_loss))",
}


def source_of(name: str, stateful: bool) -> str:
    """The expression of a measure."""
    return _LINEAR[name] if stateful else MEASURES[name].source


# Helpers that programs use, each after those that it uses itself.
HELPERS = {
    "straight_through": '''
def straight_through(value, surrogate):
    """The value, to the last bit, with the surrogate's derivatives."""
    return stop_gradient(value) + (surrogate - stop_gradient(surrogate))
''',
    "inner": """
class Inner(jaxfn.Function):
    generate_jvp_rule = True

    @staticmethod
    def forward(ctx, x):
        return jnp.round(1.37 * x + 0.123)

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output


inner = Inner.apply
""",
    "floats": """
def floats(outputs):
    return [y for y in jax.tree.leaves(outputs) if jnp.issubdtype(y.dtype, jnp.inexact)]
""",
    "loss_of": """
def loss_of(outputs):
    return sum(jnp.sum(jnp.sin(0.5 * y.astype(jnp.float32) + 0.1)) for y in floats(outputs))
""",
    "weighted": '''
def weighted(outputs):
    """Linear in the outputs."""
    return sum(jnp.vdot(y, jnp.cos(jnp.arange(y.size).reshape(y.shape))) for y in outputs)
''',
    "of_arguments": '''
def of_arguments(run, args, argnums):
    """The floating-point outputs as a function of some arguments, and these."""

    def f(*some):
        full = list(args)
        for i, value in zip(argnums, some):
            full[i] = value
        return floats(run(*full))

    return f, [args[i] for i in argnums]
''',
    "pulled_back": """
def pulled_back(run, args, argnums):
    outputs, pull = jax.vjp(*starred(of_arguments(run, args, argnums)))
    return pull([jnp.cos(y) for y in outputs])
""",
    "pushed_forward": """
def pushed_forward(run, args, argnums):
    f, some = of_arguments(run, args, argnums)
    return jax.jvp(f, some, [jnp.cos(x) for x in some])
""",
    "linearized": """
def linearized(run, args, argnums):
    outputs, push = jax.linearize(*starred(of_arguments(run, args, argnums)))
    return outputs, push(*[jnp.cos(x) for x in of_arguments(run, args, argnums)[1]])
""",
    "starred": """
def starred(pair):
    return pair[0], *pair[1]
""",
    "ran": '''
RUNS = {"count": 0}


def ran(_=None):
    """Notes that forward ran, and returns how often it has."""
    RUNS["count"] += 1
    return RUNS["count"]
''',
    "drawn_by_numpy": """
def drawn_by_numpy(shape):
    return jnp.asarray(np.random.default_rng(ran()).uniform(0.5, 1.5, shape), jnp.float32)
""",
    "drawn_by_key": """
def drawn_by_key(shape):
    return jax.random.uniform(jax.random.fold_in(jax.random.key(0), ran()), shape, minval=0.5, maxval=1.5)
""",
    "counted": """
def counted():
    return 1 + 0.125 * ran()
""",
    # One call for a batch: JAX makes a loop of it, and loses its effect in derivatives of another loop.
    "called_back": """
@jax.custom_batching.custom_vmap
def called_back(x):
    def note(x):
        ran()
        return x

    return jax.experimental.io_callback(note, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

@called_back.def_vmap
def _(axis_size, in_batched, x):
    return called_back(x), True
""",
    "noted": """
def noted(x):
    jax.debug.callback(ran)
    return x
""",
    "sharding": """
def sharding(devices, *spec):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("d",))
    return jax.sharding.NamedSharding(mesh, jax.P(*spec))
""",
}
