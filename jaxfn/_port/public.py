"""`port`: torch code rewritten for JAX, which imports torch when it is called."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from typing import Any

from jaxfn._reports import first_line
from jaxfn._torch import conversion_of
from jaxfn._torch.values.arrays import with_arrays
from jaxfn._torch.values.errors import TranslationError


def port(code: Any, /, *args: Any, examples: Sequence[Sequence[Any]] = (), **kwargs: Any) -> str:
    """Rewrites the Python source of a torch Function or function for JAX, and proves it.

    torch runs the code on the examples, and its source is rewritten by what it did there: calls of torch become
    `jax.numpy`, in-place updates assignments, and the rest does not change. The result is compared with the conversion
    under `jax.jit`, in outputs, gradients and second derivatives: at the examples, at two other sizes, at ties, zeros,
    NaN and infinity, in double precision, and for each combination of inputs that need a gradient. Code that reads the
    values of tensors is compared outside `jax.jit`, where alone it runs.

    Args:
      code: A subclass of `torch.autograd.Function`, a Python function of tensors, or the conversion of one.
      *args: Arguments of the code, of `apply` if it is a Function, with concrete arrays.
      examples: Arguments of more calls, for lines that the first call does not reach.
      **kwargs: Keyword arguments of the code.

    Returns:
      The text of a module that imports jax, numpy and jaxfn, and defines a `jaxfn.Function` or function of this name,
      with the functions that it calls. Code that draws random numbers takes a parameter `key`. Lines that no example
      reached raise `NotImplementedError`.

    Raises:
      TypeError: `code` is a module, or not torch code.
      TranslationError: A statement has no rule, the results differ, or torch or JAX raises an error. The message names
        the line.

    Examples:
      >>> import torch, jax.numpy as jnp, jaxfn
      >>> def scale(x):
      ...     square = torch.sum(x * x, dim=-1, keepdim=True)  # its squared length
      ...     return x.div(square.sqrt() + 1)
      >>> text = jaxfn.port(scale, jnp.ones((2, 3)))
      >>> print(text[text.index("def scale") :].strip())
      def scale(x):
          square = (x * x).sum(axis=-1, keepdims=True)  # its squared length
          return x / (jnp.sqrt(square) + 1)

    Torch counterpart: none.
    """
    conversion = conversion_of(code)
    from torch.nn import Module

    from jaxfn._port.source.source import write_source
    from jaxfn._torch.graph.source_lines import source_line

    if isinstance(conversion.original, Module):
        raise TypeError(
            f"the source of a module ({type(conversion.original).__name__}) is not rewritten. Call its conversion, "
            "jaxfn.from_torch(module).apply, and rewrite the Functions that it applies: jaxfn.port(F, x)"
        )
    kwargs.pop(conversion.key_name, None)
    args, kwargs, examples = with_arrays((args, kwargs, examples))
    try:
        return write_source(conversion.original, conversion.call, conversion.key_name, args, kwargs, examples)
    except TranslationError as error:  # the conversion's own, which says how from_torch converts the code
        error.args = (re.sub(r"\. Or name a JAX function[^\n]*", "", str(error)),)
        raise
    except Exception as error:  # torch, JAX and the user's code raise anything.
        name = conversion.original.__name__
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][::-1]
        raise TranslationError(
            f"the source of {name} cannot be rewritten: it raised {type(error).__name__}: "
            f"{first_line(error).rstrip('.')}. Pass arguments that torch accepts; if it does, use "
            f"jaxfn.from_torch({name}), or write {name} for JAX and compare it by jaxfn.paritycheck"
            f"{source_line(frames)}"
        ) from error
