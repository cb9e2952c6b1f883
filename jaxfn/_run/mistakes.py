"""What an error in a user's method is probably about, said in the error's own message.

Whoever comes from torch writes `x.add_(1)`, `dim=0` or `if x.sum() > 0` on the first day. What Python and JAX say of it
names neither the Function nor the cure, so both are added to the message. The error stays the same object, of the same
class: what catches it catches it still.
"""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxfn._frames import came_through
from jaxfn._protocol.context import FunctionCtx, state_of
from jaxfn._values.arguments import fits
from jaxfn._values.arrays import is_jax_type

# What torch's tensors can do and JAX's arrays cannot, where the name alone does not say what JAX has in its place.
_CURES = {
    "backward": "derivatives are taken around a function: jax.grad(f)(x), and jax.vjp(f, x) inside of a Function",
    "bmm": "write x @ y",
    "bool": "write x.astype(bool)",
    "clone": "arrays are immutable, and none has to be copied: leave it out",
    "contiguous": "arrays have no memory layout of their own: leave it out",
    "cpu": "write jax.device_put(x, device), outside of the Function",
    "cuda": "write jax.device_put(x, device), outside of the Function",
    "detach": "write jax.lax.stop_gradient(x)",
    "dim": "write x.ndim",
    "double": "write x.astype(jnp.float64)",
    "expand": "write jnp.broadcast_to(x, shape)",
    "expand_as": "write jnp.broadcast_to(x, y.shape)",
    "float": "write x.astype(jnp.float32)",
    "gather": "write jnp.take_along_axis(x, indices, axis)",
    "half": "write x.astype(jnp.float16)",
    "int": "write x.astype(jnp.int32)",
    "long": "write x.astype(int)",
    "masked_fill": "write jnp.where(mask, value, x)",
    "mm": "write x @ y",
    "new_ones": "write jnp.ones(shape, x.dtype)",
    "new_zeros": "write jnp.zeros(shape, x.dtype)",
    "numel": "write x.size",
    "numpy": "write np.asarray(x), where JAX is not tracing",
    "permute": "write x.transpose(axes)",
    "requires_grad": "ctx.needs_input_grad says which inputs are being differentiated",
    "requires_grad_": "jax.grad differentiates by a function's arguments, and nothing has to be marked: leave it out",
    "scatter": "write jnp.put_along_axis(x, indices, values, axis, inplace=False)",
    "select": "write jnp.take(x, index, axis)",
    "split": "write jnp.split(x, places, axis), which takes places to cut at, or a number of parts, and no sizes",
    "t": "write x.T",
    "to": "write x.astype(dtype), or jax.device_put(x, device) outside of the Function",
    "type": "write x.astype(dtype)",
    "type_as": "write x.astype(y.dtype)",
    "unsqueeze": "write jnp.expand_dims(x, axis)",
    "where": "write jnp.where(condition, x, y)",
}
_KEYWORDS = {"dim": "axis", "keepdim": "keepdims"}
_UNKNOWN_KEYWORD = re.compile(r"^_?(\w+)\(\) got an unexpected keyword argument '(\w+)'")
_CTX = re.compile(rf"\b{FunctionCtx.__name__}\b(?!\.)")  # its methods' own errors begin with "FunctionCtx.name()"
# What ctx itself says with a cure, without knowing whose it is.
_BY_CTX = ("save_for_backward can only save", "save_for_forward can only save", "ctx.log(...):")
_FUNCTIONS = ((jnp, "jnp"), (jax.nn, "jax.nn"), (jax.lax, "jax.lax"))


def explain(error: Exception, owner: str, method: str, ctx: FunctionCtx | None = None) -> None:
    """Adds the Function, the mistake and its cure to the message of an error, where it is a known one.

    Args:
      error: what one of the user's methods has raised.
      owner: the Function's name.
      method: what the method is called.
      ctx: what the method was given.
    """
    if str(error).startswith(_BY_CTX):
        add_to_message(error, f"In {owner}.{method}.")
    cure = _cure(error, method, ctx)
    if cure is not None:
        add_to_message(error, f"In {owner}.{method}: {cure}.")


def add_to_message(error: Exception, text: str) -> None:
    """Adds a sentence to what an error says, if no Function further in has done so."""
    if vars(error).setdefault("_jaxfn_text", text) is text:
        message, *others = error.args or ("",)
        error.args = (f"{str(message).rstrip()}\n{text}", *others)


def _cure(error: Exception, method: str, ctx: FunctionCtx | None) -> str | None:
    text = str(error)
    if text.startswith("nothing was saved as"):
        return "what backward reads by a name is saved in forward by that name, ctx.save_for_backward(name=value)"
    if text.startswith("ctx has no attribute"):
        return "assign what backward needs in forward (ctx.name = value), or in setup_context"
    if text.startswith("ctx.needs_input_grad["):
        return (
            "it has one flag for each parameter of forward, without the ctx; its name may be used in place of a number"
        )
    if isinstance(error, AttributeError):
        return _cure_of_missing(error.name) if error.name and is_jax_type(type(error.obj)) else None
    if isinstance(error, (jax.errors.ConcretizationTypeError, jax.errors.TracerIntegerConversionError)):
        return (
            "the value of an array is asked for (by if, while, float(...), .item() or an index), and it has none while "
            "JAX traces. Compute with jnp.where, jax.lax.cond or jax.lax.while_loop, or pass a Python value, which is "
            "static"
        )
    if isinstance(error, jax.errors.TracerArrayConversionError):
        return "NumPy cannot compute with what JAX traces. Use jax.numpy in its place"
    if isinstance(error, NotImplementedError) and "array.view()" in text:
        return _cure_of_view(error)
    if isinstance(error, TypeError):
        return _cure_of_type_error(error, text)
    if isinstance(error, ValueError) and "values to unpack" in text and ctx and "saved_" in _lines(error)[-1]:
        return _cure_of_unpacking(method, ctx)
    return None


def _cure_of_missing(name: str) -> str | None:
    """What to write in the place of one of torch's methods."""
    if name in _CURES:
        return f"JAX's arrays have no {name}; {_CURES[name]}"
    if name.endswith("_") and not name.endswith("__"):
        return f"arrays are immutable, so there is no {name}. Compute a new array, and use and return that"
    for module, prefix in _FUNCTIONS:
        if callable(getattr(module, name, None)):
            return f"JAX's arrays have no {name}; write {prefix}.{name}(x)"
    return None


def _lines(error: Exception) -> list[str]:
    """The lines of code that an error came through, the one that raised it last; empty where there is no source."""
    return [frame.line or "" for frame in traceback.extract_tb(error.__traceback__)]


def _cure_of_type_error(error: TypeError, text: str) -> str | None:
    unknown = _UNKNOWN_KEYWORD.search(text)
    if unknown and unknown[2] in _KEYWORDS and any(hasattr(module, unknown[1]) for module, _ in _FUNCTIONS):
        return f"JAX calls {unknown[2]} {_KEYWORDS[unknown[2]]}"
    if _CTX.search(text):
        if "static_argnums" in text:
            return (
                "jax.jit cannot take the ctx. Compile what calls the Function (jax.jit(f), where f calls apply), or a "
                "function without ctx inside of this method; or, if the ctx was to be an input, write "
                "forward(ctx, x, ...)"
            )
        return "the ctx is used as if it were an input. It is the first parameter: write forward(ctx, x, ...)"
    return _cure_of_view(error) if "as a data type" in text else None


def _cure_of_view(error: Exception) -> str | None:
    if not any(".view(" in line for line in _lines(error)):
        return None
    return "view(dtype) is about the bits of an array in JAX; write x.reshape(shape)"


def _cure_of_unpacking(method: str, ctx: FunctionCtx) -> str:
    num_saved = len(ctx.saved_tensors)
    if num_saved:
        return f"ctx.saved_tensors holds {num_saved}, as many as forward saved"
    if method == "backward" or method == "jvp":
        return "forward saved nothing. Call ctx.save_for_backward(...) there"
    return "nothing is saved yet. ctx.saved_tensors is for backward; forward has its inputs as they are"


def is_refused_call(error: TypeError, function: Callable[..., Any], args: Sequence[object]) -> bool:
    """Whether an error says that a function cannot be called with so many arguments."""
    if came_through(error, inspect.unwrap(function)):  # a decorator has called it with others
        return False
    try:
        signature = inspect.signature(function)
    except ValueError:  # a built-in, which does not say
        return False
    return not fits(signature, args, {})


def wrong_signature(
    owner: str, method: str, function: Callable[..., Any], ctx: FunctionCtx, num_others: int
) -> TypeError:
    """What to raise where a method cannot take what it is called with."""
    signature = inspect.signature(function)
    names = list(signature.parameters)
    outputs = "outputs" if state_of(ctx).num_outputs != 1 else "output"
    given, pattern = {
        "backward": (f"ctx and the gradients of {num_others} {outputs}", "backward(ctx, *grad_outputs)"),
        "jvp": (f"ctx and the tangents of {num_others} inputs", "jvp(ctx, *tangents)"),
        "setup_context": ("ctx, the inputs and the output", "setup_context(ctx, inputs, output)"),
    }[method]
    if names and names[0] == "self":
        cure = f"A Function has no instances: make it a static method, {pattern}, without self"
    elif len(names) == num_others:
        cure = f"Its first parameter, {names[0]!r}, is taken for the ctx: write {pattern}"
    else:
        cure = f"Write {pattern}"
    return TypeError(f"{owner}.{method}{signature} cannot take what it is called with, {given}. {cure}.")
