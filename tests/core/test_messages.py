"""Messages of common mistakes: they name the Function, the mistake and the fix, under the transformations too."""

import dataclasses
import functools
import inspect
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

import jaxfn
from tests.support.contexts import CONTEXTS
from tests.support.marks import HIGH_PRIMITIVES, cells, row

X = jnp.arange(3.0) + 1


def build(*, forward=lambda ctx, x: x * 2, backward=lambda ctx, grad_output: grad_output, **methods):
    """A Function called Thing."""
    methods = {name: staticmethod(method) for name, method in methods.items()}
    body = {"forward": staticmethod(forward), "backward": staticmethod(backward), **methods}
    return type("Thing", (jaxfn.Function,), body)


def backward_of(used):
    """A backward that does this with its gradient."""

    def backward(ctx, grad_output):
        return used(grad_output)

    return backward


def unpack_saved(ctx, grad_output):
    (x,) = ctx.saved_tensors
    return x * grad_output


def save_one(ctx, x):
    ctx.save_for_backward(x)
    return x * 2


def forget_comma_and_reshape(ctx, grad_output):
    scale = ctx.saved_tensors
    return grad_output.reshape(scale.shape)


def save_two(ctx, x):
    ctx.save_for_backward(x, x)
    return x * 2


# Those that docs/errors.md has too are tested there.
MISTAKES = {
    "ctx forgotten in a forward with defaults": (
        lambda: build(forward=lambda x, factor=2: x * factor),
        TypeError,
        "In Thing.forward: the ctx is used as if it were an input. It is the first parameter: write forward(ctx, x",
    ),
    "ctx forgotten in backward": (
        lambda: build(backward=lambda grad_output: grad_output),
        TypeError,
        "Thing.backward(grad_output) cannot take what it is called with, ctx and the gradients of 1 output. Its first "
        "parameter, 'grad_output', is taken for the ctx: write backward(ctx, *grad_outputs)",
    ),
    "a gradient too many": (
        lambda: build(backward=lambda ctx, first, second: first),
        TypeError,
        "Thing.backward(ctx, first, second) cannot take what it is called with, ctx and the gradients of 1 output.",
    ),
    "ctx forgotten in setup_context": (
        lambda: build(forward=lambda x: x * 2, setup_context=lambda inputs, output: None),
        TypeError,
        "Thing.setup_context(inputs, output) cannot take what it is called with, ctx, the inputs and the output. Its "
        "first parameter, 'inputs', is taken for the ctx: write setup_context(ctx, inputs, output)",
    ),
    "self in forward": (
        lambda: build(forward=lambda self, ctx, x: x * 2),
        TypeError,
        "A Function has no instances: make forward a static method, forward(ctx, ...), without self",
    ),
    "self in a forward without ctx": (
        lambda: build(forward=lambda self, x: x * 2, setup_context=lambda ctx, inputs, output: None),
        TypeError,
        "A Function has no instances: make forward a static method, forward(...), without self",
    ),
    "self in backward": (
        lambda: build(backward=lambda self, ctx, grad_output: grad_output),
        TypeError,
        "A Function has no instances: make it a static method, backward(ctx, *grad_outputs), without self",
    ),
    "in place in backward": (
        lambda: build(backward=backward_of(lambda g: g.mul_(2))),
        AttributeError,
        "In Thing.backward: arrays are immutable, so there is no mul_. Compute a new array",
    ),
    "requires_grad_": (
        lambda: build(forward=lambda ctx, x: x.requires_grad_()),
        AttributeError,
        "In Thing.forward: JAX's arrays have no requires_grad_; jax.grad differentiates by a function's arguments",
    ),
    "y.backward": (
        lambda: build(backward=backward_of(lambda g: (g * 2).backward())),
        AttributeError,
        "In Thing.backward: JAX's arrays have no backward; derivatives are taken around a function",
    ),
    "a method of torch's": (
        lambda: build(forward=lambda ctx, x: x.detach()),
        AttributeError,
        "In Thing.forward: JAX's arrays have no detach; write jax.lax.stop_gradient(x)",
    ),
    "a function of torch's": (
        lambda: build(forward=lambda ctx, x: x.sigmoid()),
        AttributeError,
        "In Thing.forward: JAX's arrays have no sigmoid; write jax.nn.sigmoid(x)",
    ),
    "view": (lambda: build(forward=lambda ctx, x: x.view(-1)), TypeError, "write x.reshape(shape)"),
    "view of two sizes": (
        lambda: build(forward=lambda ctx, x: x.view(3, 1)),
        NotImplementedError,
        "In Thing.forward: view(dtype) is about the bits of an array in JAX; write x.reshape(shape)",
    ),
    "split, of sizes in torch": (
        lambda: build(forward=lambda ctx, x: x.split(2)),
        AttributeError,
        "In Thing.forward: JAX's arrays have no split; write jnp.split(x, indices, axis), which takes the indices",
    ),
    "dim": (lambda: build(forward=lambda ctx, x: x.sum(dim=0)), TypeError, "In Thing.forward: JAX calls dim axis"),
    "a flag too far": (
        lambda: build(backward=lambda ctx, g: g if ctx.needs_input_grad[3] else None),
        IndexError,
        "ctx.needs_input_grad[3] is out of range for 1 inputs (x)\nIn Thing.backward: it has one flag for each",
    ),
    "nothing saved": (
        lambda: build(backward=unpack_saved),
        ValueError,
        "In Thing.backward: forward saved nothing. Call ctx.save_for_backward(...) there",
    ),
    "more saved": (
        lambda: build(forward=save_two, backward=unpack_saved),
        ValueError,
        "In Thing.backward: ctx.saved_tensors holds 2, as many as forward saved",
    ),
    "an attribute that forward did not set": (
        lambda: build(backward=lambda ctx, grad_output: grad_output * ctx.scale),
        AttributeError,
        "ctx has no attribute 'scale': it was not set here or in forward (set: none)\nIn Thing.backward: assign what",
    ),
    "a parameter too few": (
        lambda: build(backward=lambda ctx: None),
        TypeError,
        "Thing.backward(ctx) cannot take what it is called with, ctx and the gradients of 1 output. Write "
        "backward(ctx, *grad_outputs), with a parameter for each.",
    ),
    "saved_tensors assigned": (
        lambda: build(forward=lambda ctx, x: setattr(ctx, "saved_tensors", (x,))),
        AttributeError,
        "In Thing.forward: call ctx.save_for_backward(...) in forward",
    ),
    "nearly a name of ctx": (
        lambda: build(forward=save_one, backward=lambda ctx, grad_output: ctx.saved_variable[0]),
        AttributeError,
        "(set: none)\nIn Thing.backward: did you mean ctx.saved_variables",
    ),
    "a method of ctx, misspelt": (
        lambda: build(forward=lambda ctx, x: ctx.save_for_backwards(x)),
        AttributeError,
        "(set: none)\nIn Thing.forward: did you mean ctx.save_for_backward",
    ),
    "a name where values were saved by position": (
        lambda: build(forward=save_two, backward=lambda ctx, grad_output: ctx.saved_variables["weight"]),
        KeyError,
        "nothing was saved as 'weight'; saved: nothing, and by position 2: ctx.saved_tensors",
    ),
    "the first of no saved tensors": (
        lambda: build(backward=lambda ctx, grad_output: ctx.saved_tensors[0]),
        IndexError,
        "In Thing.backward: forward saved nothing. Call ctx.save_for_backward(...) there",
    ),
    "arithmetic with all saved tensors": (
        lambda: build(forward=save_two, backward=lambda ctx, grad_output: 2.0 * ctx.saved_tensors),
        TypeError,
        "In Thing.backward: ctx.saved_tensors is a tuple: write (x, ...) = ctx.saved_tensors, or ctx.saved_tensors[0]",
    ),
    "a function of all saved tensors": (
        lambda: build(forward=save_two, backward=lambda ctx, grad_output: jnp.sin(ctx.saved_tensors)),
        TypeError,
        "In Thing.backward: ctx.saved_tensors is a tuple: write (x, ...) = ctx.saved_tensors, or ctx.saved_tensors[0]",
    ),
    "a forgotten comma, and an attribute": (
        lambda: build(forward=save_one, backward=forget_comma_and_reshape),
        AttributeError,
        "In Thing.backward: ctx.saved_tensors is a tuple: write (scale,) = ctx.saved_tensors, or ctx.saved_tensors[0]",
    ),
    "transpose of two axes": (
        lambda: build(forward=lambda ctx, x: x.reshape(3, 1, 1).transpose(0, 1)),
        TypeError,
        "In Thing.forward: transpose takes all axes in JAX; write jnp.swapaxes(x, first, second)",
    ),
    "flatten from an axis": (
        lambda: build(forward=lambda ctx, x: x.flatten(1)),
        ValueError,
        "In Thing.forward: flatten takes no axis in JAX; write x.reshape(*x.shape[:axis], -1)",
    ),
    "unbiased": (
        lambda: build(forward=lambda ctx, x: x / x.std(unbiased=False)),
        TypeError,
        "In Thing.forward: JAX calls unbiased correction (1 for True, 0 for False)",
    ),
    "a flag of no parameter": (
        lambda: build(backward=lambda ctx, grad_output: ctx.needs_input_grad.weight),
        AttributeError,
        "ctx.needs_input_grad.weight: 'weight' is not among the parameters: x\nIn Thing.backward: it has one flag",
    ),
    "a string saved": (
        lambda: build(forward=lambda ctx, x: ctx.save_for_backward("x")),
        TypeError,
        "\nIn Thing.forward.",
    ),
    "a compiled forward": (
        lambda: build(forward=jax.jit(lambda ctx, x: x * 2)),
        TypeError,
        "In Thing.forward: jax.jit cannot take the ctx. Compile what calls the Function",
    ),
    "a compiled backward": (
        lambda: build(backward=jax.jit(lambda ctx, grad_output: grad_output)),
        TypeError,
        "In Thing.backward: jax.jit cannot take the ctx. Compile what calls the Function",
    ),
}


def with_text(error):
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


IN_OTHER_CONTEXTS = [
    ("ctx forgotten in a forward with defaults", "cond"),
    ("ctx forgotten in backward", "scan"),
    ("ctx forgotten in setup_context", "vmap"),
    ("in place in backward", "checkpoint"),
    ("a function of torch's", "cond"),
    ("a flag too far", "vmap"),
    ("nothing saved", "scan"),
    ("an attribute that forward did not set", "checkpoint"),
    ("a compiled forward", "vmap"),
]


@row("L1")
@pytest.mark.parametrize(
    ("mistake", "context"),
    [(mistake, context) for mistake in MISTAKES for context in ("eager", "jit")] + IN_OTHER_CONTEXTS,
)
def test_a_mistake_names_the_Function_and_the_fix(mistake, context):
    make, kind, text = MISTAKES[mistake]
    thing = make()
    function = CONTEXTS[context](lambda x: thing.apply(x))
    with pytest.raises(kind) as caught:
        jax.grad(lambda x: function(x).sum())(X)
    assert text in str(caught.value)
    assert str(caught.value).count("\nIn Thing") <= 1  # said once, however many Functions it passes


@row("L1")
@pytest.mark.parametrize("ask", [lambda x: x.item(), float, bool, int], ids=["item", "float", "bool", "int"])
@pytest.mark.parametrize("method", ["forward", "backward"])
def test_asking_for_a_value_that_is_traced(method, ask):
    def asking(ctx, x):
        return x * ask(x.sum())

    thing = build(**{method: asking})
    with pytest.raises(jax.errors.ConcretizationTypeError) as caught:
        jax.jit(jax.grad(lambda x: thing.apply(x).sum()))(X)
    assert f"In Thing.{method}: the value of an array is read" in str(caught.value)
    assert "jnp.where" in str(caught.value)


@row("L1")
def test_a_Function_inside_another_one_is_the_one_that_is_named():
    inner = build(forward=lambda ctx, x: x.add_(1))
    outer = type("Outer", (jaxfn.Function,), {"forward": staticmethod(lambda ctx, x: inner.apply(x))})
    with pytest.raises(AttributeError) as caught:
        outer.apply(X)
    assert "In Thing.forward" in str(caught.value) and "Outer" not in str(caught.value)


def doubled_by_a_kernel(x):
    def kernel(x_ref, out_ref):
        out_ref[...] = 2 * x_ref[...]

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


def saves_what_a_kernel_makes(ctx, x):
    ctx.save_for_backward(doubled_by_a_kernel(x))
    return x * x


@pytest.mark.parametrize(
    ("method", "make"),
    [
        ("backward", lambda: build(forward=save_two, backward=lambda ctx, g: doubled_by_a_kernel(g))),
        ("forward", lambda: build(forward=saves_what_a_kernel_makes, backward=lambda ctx, g: g * ctx.saved_tensors[0])),
    ],
)
@row("L1")
def test_a_second_derivative_through_a_kernel(method, make):
    Thing = make()
    with pytest.raises(ValueError, match="Linearization failed") as info:
        jax.grad(lambda x: jax.grad(lambda x: (Thing.apply(x) ** 2).sum())(x).sum())(jnp.ones(3))
    assert f"In Thing.{method}: a derivative goes through an operation that has none, such as a Pallas" in str(
        info.value
    )


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    """Nothing can be added to its message."""

    code: int


@row("L1")
@pytest.mark.parametrize(
    "error", [AttributeError("'Config' object has no attribute 'add_'"), FrozenError(3)], ids=["usual", "frozen"]
)
def test_other_errors_of_user_code_are_left_alone(error):
    def raising(ctx, x):
        raise error

    before = str(error)
    with pytest.raises(type(error)) as caught:
        build(forward=raising).apply(X)
    assert caught.value is error and str(error) == before


class RayTracer:
    def __init__(self, *, rays=1):
        self.rays = rays


def with_one_more(rule):
    """A decorator that passes an additional argument."""

    @functools.wraps(rule)
    def called(ctx, *args):
        return rule(ctx, 1, *args)

    return called


UNLIKE = {  # what resembles a mistake of the first day: the method, and what it raises
    "a shape": ("forward", lambda ctx, x: [rows + columns for rows, columns in [x.shape]]),
    "a shape in backward": ("backward", lambda ctx, g: [rows + columns for rows, columns in [g.shape]]),
    "an object's attribute": ("forward", lambda ctx, x: RayTracer().to(x)),
    "a function's parameter": ("forward", lambda ctx, x: with_one_more(x, dim=0)),
    "an object's parameter": ("forward", lambda ctx, x: RayTracer(dim=3)),
    "a method of the ctx": ("forward", lambda ctx, x: ctx.mark_dirty(foo=x)),
    "a shape without parentheses": ("forward", lambda ctx, x: jnp.zeros(3, 4)),
    "a decorated backward": ("backward", with_one_more(lambda ctx, one, g: len(one))),
}


@row("L1")
@pytest.mark.parametrize("case", UNLIKE)
def test_no_fix_is_suggested_where_it_is_wrong(case):
    method, raising = UNLIKE[case]
    with pytest.raises((TypeError, ValueError, AttributeError)) as ours:
        jax.grad(lambda x: build(**{method: raising}).apply(x).sum())(X)
    assert "Thing" not in str(ours.value)
    assert Path(traceback.extract_tb(ours.value.__traceback__)[0].filename) == Path(__file__)


@row("L1")
def test_a_neighbour_of_jaxfn_is_user_code():
    """A folder next to jaxfn's whose name begins with jaxfn's."""
    neighbour = f"{Path(jaxfn.__file__).parent}_layers/mine.py"
    namespace = {}
    exec(compile("def raising(ctx, x):\n    raise KeyError('mine')", neighbour, "exec"), namespace)
    with pytest.raises(KeyError) as caught:
        build(forward=namespace["raising"]).apply(X)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].filename == neighbour


@row("L1")
def test_torchs_old_style():
    class Scale(jaxfn.Function):
        def __init__(self, factor):
            self.factor = factor

        def forward(self, x):
            return x * self.factor

    for call in (lambda: Scale(2.0)(X), Scale, lambda: Scale(X)):
        with pytest.raises(TypeError, match="Scale cannot be instantiated") as caught:
            call()
        assert "Call Scale.apply(...)" in str(caught.value) and "arguments of forward" in str(caught.value)


@row("L1")
@HIGH_PRIMITIVES
def test_forward_mode_of_something_else_inside_forward():
    def push(ctx, x):
        identity = jax.custom_vjp(lambda x: x)
        identity.defvjp(lambda x: (x, None), lambda _, ct: (ct,))
        return jax.jvp(identity, (x,), (x,))[1]

    with pytest.raises(TypeError, match="forward-mode") as caught:
        jax.grad(lambda x: build(forward=push).apply(x).sum())(X)
    assert "Thing" not in str(caught.value)


@dataclasses.dataclass
class Layer:
    weight: object

    def __call__(self, x):
        return x * self.weight


def scaled(weight, x):
    return x * weight


HIDING = {
    "function": lambda w: lambda x: x * w,
    "partial": lambda w: functools.partial(scaled, w),
    "method": lambda w: Layer(w).__call__,
    "Layer": Layer,
}


@row("A9", "L1")
@cells("kind, context", [("function", "eager"), ("partial", "jit"), ("method", "checkpoint"), ("Layer", "jit")])
def test_a_weight_that_an_argument_closes_over(kind, context):
    thing = build(forward=lambda ctx, x, layer: layer(x), backward=lambda ctx, g: (g, None))
    wrap = CONTEXTS[context]
    with pytest.raises(NotImplementedError, match=r"Thing\.forward closes over a value") as caught:
        jax.grad(lambda w: wrap(lambda w: thing.apply(X, HIDING[kind](w)).sum())(w))(2.0)
    assert f"(in input 1 ('layer'), inside an object of type {kind})" in str(caught.value)
    assert "Pass that value to Thing as an argument" in str(caught.value)


WRONG_GRADIENTS = {
    "shape": lambda ctx, grad_output: grad_output[:2],
    "number": lambda ctx, grad_output: (grad_output, grad_output),
    "type": lambda ctx, grad_output: "gradient",
    "complex": lambda ctx, grad_output: grad_output * 1j,
}


@row("L1")
@cells(
    "wrong, context",
    [("shape", "eager"), ("shape", "cond"), ("number", "jit"), ("type", "scan"), ("type", "vmap"),
     ("complex", "checkpoint")],
    WRONG_GRADIENTS,
    CONTEXTS,
)  # fmt: skip
def test_the_line_of_a_backward_that_returned_something_wrong(wrong, context):
    backward = WRONG_GRADIENTS[wrong]
    function = CONTEXTS[context](build(backward=backward).apply)
    line = inspect.getsourcelines(backward)[1]
    with pytest.raises((RuntimeError, TypeError), match=r"^Thing\.backward returned") as caught:
        jax.grad(lambda x: function(x).sum())(X)
    assert str(caught.value).endswith(f"\nThing.backward is at {__file__}:{line}.")


@row("L1")
def test_the_line_of_a_jvp_that_returned_something_wrong():
    def jvp(ctx, tangent):
        return tangent[:2]

    with pytest.raises(RuntimeError, match=r"^Thing\.jvp returned") as caught:
        jax.jvp(build(jvp=jvp).apply, (X,), (X,))
    assert str(caught.value).endswith(f"\nThing.jvp is at {__file__}:{inspect.getsourcelines(jvp)[1]}.")


@row("L1")
@cells(
    "method, context",
    [("forward", "eager"), ("backward", "jit"), ("forward", "checkpoint"), ("backward", "vmap"), ("forward", "scan"),
     ("backward", "cond")],
    ["forward", "backward"],
    CONTEXTS,
)  # fmt: skip
def test_a_traceback_shows_user_code_alone(method, context):
    def failing(ctx, x):
        raise KeyError("mine")

    function = CONTEXTS[context](build(**{method: failing}).apply)
    with pytest.raises(KeyError, match="mine") as caught:
        jax.grad(lambda x: function(x).sum())(X)
    files = [Path(frame.filename) for frame in traceback.extract_tb(caught.value.__traceback__)]
    own = Path(jaxfn.__file__).parent
    assert not [file for file in files if file.is_relative_to(own)]
    assert files[-1] == Path(__file__)


@row("L1")
def test_a_traceback_shows_all_where_jax_is_configured_to():
    def failing(ctx, x):
        raise KeyError("mine")

    filtering = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    try:
        with pytest.raises(KeyError) as caught:
            build(forward=failing).apply(X)
    finally:
        jax.config.update("jax_traceback_filtering", filtering)
    names = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert any(Path(name).is_relative_to(Path(jaxfn.__file__).parent) for name in names)


@row("L1")
def test_a_tuple_that_is_not_that_of_saved_tensors_has_no_hint():
    def backward(ctx, grad_output):
        pair = ctx.saved_tensors[0], grad_output
        return grad_output * pair

    thing = build(forward=save_one, backward=backward)
    with pytest.raises(TypeError, match="tuple") as caught:
        jax.grad(lambda x: thing.apply(x).sum())(X)
    assert "saved_tensors" not in str(caught.value)
