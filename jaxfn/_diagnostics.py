"""Errors of the user's methods: where they come from, and hints about what is probably wrong.

None of this runs in a call that succeeds. Someone new from torch writes `x.add_(1)`, `dim=0` or `if x.sum() > 0`. The
errors of Python and JAX name neither the Function nor the fix, so both are added to the message. The error itself is
raised again, so that code which catches its class still works.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import os
import re
import textwrap
import traceback
from collections.abc import Callable, Sequence
from importlib.resources import files
from operator import is_
from types import TracebackType
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxfn._signature import InputNames, fits
from jaxfn._tree import is_jax_type

# Each ends with the separator, so that a sibling such as jaxfn2 or jax_kernels does not count.
_OWN_FOLDER, _FOLDER_OF_JAX = (os.path.join(os.path.dirname(file), "") for file in (__file__, jax.__file__))


class NeedsValuesError(Exception):
    """Code needs the values of an array that is traced to a jaxpr, and might run on a concrete one."""


NEEDS_VALUES = (
    NeedsValuesError,
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
"""The errors of code that needs the values of a traced array."""


def hide_own_frames(error: Exception) -> None:
    """Removes jaxfn's own frames from an error's traceback, unless `JAX_TRACEBACK_FILTERING` is "off"."""
    if cast(Any, jax.config).jax_traceback_filtering == "off":
        return
    entries: list[TracebackType] = []
    entry = error.__traceback__
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    shown = None
    for entry in reversed(entries):
        if not entry.tb_frame.f_code.co_filename.startswith(_OWN_FOLDER):
            shown = TracebackType(shown, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    error.with_traceback(shown)  # a frozen dataclass would reject an assignment


def source_location(function: Callable[..., Any]) -> str | None:
    """Returns the location of a function, "file:line"; `None` if it has no code object."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return None if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def location_without_return(function: Callable[..., Any]) -> str | None:
    """Returns the file and line of a function, if its source text has neither a return nor a raise statement."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError):  # a class with __call__, a built-in, an interpreter's prompt
        return None
    definition = tree.body[0] if tree.body else None
    if not isinstance(definition, ast.FunctionDef):  # a lambda always returns
        return None
    return None if any(map(_returns, definition.body)) else source_location(function)


def _returns(node: ast.AST) -> bool:
    """Whether a node has a return or raise statement, outside functions and classes that it defines."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
        return False
    return isinstance(node, (ast.Return, ast.Raise)) or any(map(_returns, ast.iter_child_nodes(node)))


_KEYWORDS = {"dim": "axis", "keepdim": "keepdims", "unbiased": "correction (1 for True, 0 for False)"}
# Methods that JAX's arrays have too: part of an error's message, the call on the line that raised it, and the hint.
_OTHER_METHODS = (
    ("array.view()", ".view(", "view(dtype) is about the bits of an array in JAX; write x.reshape(shape)"),
    ("as a data type", ".view(", "view(dtype) is about the bits of an array in JAX; write x.reshape(shape)"),
    ("'int' object is not callable", ".size(", "x.size is the number of elements in JAX; write x.shape, or x.shape[0]"),
    ("transpose permutation", ".transpose(", "transpose takes all axes in JAX; write jnp.swapaxes(x, first, second)"),
    ("'order' argument", ".flatten(", "flatten takes no axis in JAX; write x.reshape(*x.shape[:axis], -1)"),
)
_UNKNOWN_KEYWORD = re.compile(r"^_?(\w+)\(\) got an unexpected keyword argument '(\w+)'")
_CTX = re.compile(r"\bFunctionCtx\b(?!\.)")  # its methods' own errors begin with "FunctionCtx.name()"
# Messages of ctx itself. They need no hint, but the name of the Function, which ctx does not know.
_BY_CTX = ("save_for_backward can only save", "save_for_forward can only save", "ctx.log(...):")
_FUNCTIONS = ((jnp, "jnp"), (jax.nn, "jax.nn"), (jnp.linalg, "jnp.linalg"), (jax.lax, "jax.lax"))


ADDED = "_jaxfn_text"  # the attribute of an error with what is added to its message


def add_hint(error: Exception, function_name: str, method: str, function: Callable[..., Any], ctx: Any = None) -> None:
    """Adds the Function, the mistake and the fix to the message of an error of one of the user's methods."""
    if str(error).startswith(_BY_CTX):
        add_to_message(error, f"In {function_name}.{method}.")
    hint = _hint(error, method, ctx)
    if hint is not None:
        # JAX's own errors name the outermost traced function and its file.
        location = source_location(function) if isinstance(error, jax.errors.JAXTypeError) else None
        where = "" if location is None else f" ({method} is at {location})"
        add_to_message(error, f"In {function_name}.{method}: {hint}{where}.")


def add_to_message(error: Exception, text: str) -> None:
    """Adds a sentence to the message of an error, unless an inner Function has done so."""
    if vars(error).setdefault(ADDED, text) is text:
        message, *others = error.args or ("",)
        error.args = (f"{str(message).rstrip()}\n{text}", *others)


def _hint(error: Exception, method: str, ctx: Any) -> str | None:
    text = error.args[0] if isinstance(error, KeyError) else str(error)  # the text of a KeyError is in quotes
    if text.startswith("ctx has no attribute") and isinstance(error, AttributeError):
        close = difflib.get_close_matches(error.name or "", dir(error.obj), 1, 0.85)
        if close:
            return f"did you mean ctx.{close[0]}"
    for start, hint in _HINTS.items():
        if text.startswith(start):
            return hint
    if isinstance(error, AttributeError) and error.name and is_jax_type(type(error.obj)):
        return _hint_for_missing(error.name)
    if isinstance(error, (jax.errors.ConcretizationTypeError, jax.errors.TracerIntegerConversionError)):
        return _READS_VALUE
    if isinstance(error, jax.errors.TracerArrayConversionError):
        return "NumPy cannot compute with what JAX traces. Use jax.numpy instead"
    hint = _hint_for_type_error(text) if isinstance(error, TypeError) else None
    if hint is not None:
        return hint
    line, variables = _last_line_outside_jax(error)
    for part, call, hint in _OTHER_METHODS:
        if part in text and call in line:
            return hint
    if ctx and "saved_" in line and isinstance(error, (ValueError, IndexError)):
        return _hint_for_number(method, ctx) if "values to unpack" in text or "index out of range" in text else None
    return _hint_for_tuple(line, variables, ctx) if ctx and ("tuple" in text or "sequence" in text) else None


_READS_VALUE = (
    "the value of an array is read (by if, while, float(...), .item() or an index), and it has none while JAX "
    "traces. Compute with jnp.where, jax.lax.cond or jax.lax.while_loop, or pass a Python value, which is static"
)
# By the start of a message.
_HINTS = {
    "nothing was saved as": (
        "what backward reads by a name is saved in forward by that name, ctx.save_for_backward(name=value)"
    ),
    "ctx has no attribute": "assign what backward needs in forward (ctx.name = value), or in setup_context",
    "property 'saved_tensors'": "call ctx.save_for_backward(...) in forward",
    "ctx.needs_input_grad": (
        "it has one flag for each parameter of forward, without the ctx; its name may be used in place of a number"
    ),
    "Linearization failed to produce known values": (
        "a derivative goes through an operation that has none, such as a Pallas kernel. Make that operation a "
        "separate Function with a backward, and call its apply here"
    ),
    "Shapes must be 1D sequences of concrete values": _READS_VALUE,
}


def add_numpy_hint(error: Exception, function_name: str, names: InputNames, inputs: Sequence[object]) -> None:
    """Names the inputs that were NumPy scalars, and so arrays, in the message of an error with `_READS_VALUE`."""
    text = vars(error).get(ADDED, "")
    if text.startswith(f"In {function_name}.forward: ") and _READS_VALUE in text:
        message, *others = error.args
        for index, value in enumerate(inputs):
            if isinstance(value, np.generic):
                fix = f"{type(value.item()).__name__}({names.names[index]})"
                message += f" Here {names.describe(index)} was a NumPy scalar, which is an array: pass {fix}."
        error.args = (message, *others)


def _hint_for_missing(name: str) -> str | None:
    """Returns what replaces one of torch's methods. The file has those whose name alone does not tell it."""
    lines = files("jaxfn").joinpath("torch_methods.txt").read_text("utf-8").splitlines()
    replacements = dict(line.split(": ", 1) for line in lines)
    if name in replacements:
        return f"JAX's arrays have no {name}; {replacements[name]}"
    if name.endswith("_") and not name.endswith("__"):
        return f"arrays are immutable, so there is no {name}. Compute a new array, and use and return that"
    for module, prefix in _FUNCTIONS:
        if callable(getattr(module, name, None)):
            return f"JAX's arrays have no {name}; write {prefix}.{name}(x)"
    return None


def _last_line_outside_jax(error: Exception) -> tuple[str, dict[str, Any]]:
    """Returns an error's last line of code outside JAX, empty without source, and the variables there."""
    frames = list(traceback.walk_tb(error.__traceback__))
    own = [i for i, (frame, _) in enumerate(frames) if not frame.f_code.co_filename.startswith(_FOLDER_OF_JAX)]
    if not own:
        return "", {}
    lines = traceback.extract_tb(error.__traceback__)
    return lines[own[-1]].line or "", frames[own[-1]][0].f_locals


def _hint_for_type_error(text: str) -> str | None:
    unknown = _UNKNOWN_KEYWORD.search(text)
    if unknown and unknown[2] in _KEYWORDS and any(hasattr(module, unknown[1]) for module, _ in _FUNCTIONS):
        return f"JAX calls {unknown[2]} {_KEYWORDS[unknown[2]]}"
    if _CTX.search(text):
        if "static_argnums" in text:
            return (
                "jax.jit cannot take the ctx. Compile what calls the Function (jax.jit(f), where f calls apply), or a "
                "function without ctx inside this method; or, if the ctx was to be an input, write "
                "forward(ctx, x, ...)"
            )
        return "the ctx is used as if it were an input. It is the first parameter: write forward(ctx, x, ...)"
    return None


def _hint_for_tuple(line: str, variables: dict[str, Any], ctx: Any) -> str | None:
    """Returns the hint for the tuple of saved arrays, or a variable that is that tuple, used as an array."""
    saved = ctx.saved_tensors
    names = [name for name, x in variables.items() if type(x) is tuple and len(x) == len(saved) > 0]
    names = [name for name in names if all(map(is_, variables[name], saved))]
    if not names and "saved_" not in line:
        return None
    name = names[0] if names else "x"
    unpacked = f"({name},)" if len(saved) == 1 else f"({name}, ...)"
    return f"ctx.saved_tensors is a tuple: write {unpacked} = ctx.saved_tensors, or ctx.saved_tensors[0]"


def _hint_for_number(method: str, ctx: Any) -> str:
    num_saved = len(ctx.saved_tensors)
    if num_saved:
        return f"ctx.saved_tensors holds {num_saved}, as many as forward saved"
    if method == "backward" or method == "jvp":
        return "forward saved nothing. Call ctx.save_for_backward(...) there"
    return "nothing is saved yet. ctx.saved_tensors is for backward; in forward, use the inputs themselves"


def signature_error(
    error: TypeError, function_name: str, method: str, function: Callable[..., Any], args: Sequence[object]
) -> TypeError | None:
    """Returns a better error for the call of a method that cannot take these arguments; `None` if it can."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    frames = traceback.walk_tb(error.__traceback__)
    if any(frame.f_code is code for frame, _ in frames):  # it was entered, perhaps by a decorator with other arguments
        return None
    try:
        signature = inspect.signature(function)
    except ValueError:  # a built-in without a signature
        return None
    if fits(signature, args, {}):
        return None
    names, num_others = list(signature.parameters), len(args) - 1
    outputs = "outputs" if getattr(args[0], "num_outputs", 0) != 1 else "output"
    passed, pattern = {
        "backward": (f"ctx and the gradients of {num_others} {outputs}", "backward(ctx, *grad_outputs)"),
        "jvp": (f"ctx and the tangents of {num_others} inputs", "jvp(ctx, *tangents)"),
        "setup_context": ("ctx, the inputs and the output", "setup_context(ctx, inputs, output)"),
    }[method]
    if method == "backward" and isinstance(args[1], list):
        hint = "forward returned a list, which is one output: return a tuple of the outputs"
    elif names and names[0] == "self":
        hint = f"A Function has no instances: make it a static method, {pattern}, without self"
    elif len(names) == num_others and names[0] != "ctx":
        hint = f"Its first parameter, {names[0]!r}, is taken for the ctx: write {pattern}"
    else:
        hint = f"Write {pattern}, with a parameter for each"
    return TypeError(f"{function_name}.{method}{signature} cannot take what it is called with, {passed}. {hint}.")
