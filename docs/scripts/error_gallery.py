"""Runs the mistakes on docs/errors.md, and writes below each what jaxfn says of it.

python docs/scripts/error_gallery.py
"""

from __future__ import annotations

import importlib.util
import linecache
import re
import sys
import warnings
from pathlib import Path
from types import ModuleType

import jax

PAGE = Path(__file__).parents[1] / "errors.md"
IMPORTS = "import jax, jax.numpy as jnp, numpy as np, jaxfn\n"
_MISTAKE = re.compile(r"(?<=```python\n)(?P<code>.*?)```\n(?:\n```text\n(?P<message>.*?)```\n)?", re.DOTALL)


def gallery(page: str) -> str:
    """The page, with today's messages. Where torch is not installed, those of programs that need it stay."""
    return _MISTAKE.sub(lambda found: _with_message(found["code"], found["message"]), page)


def _with_message(code: str, message: str | None) -> str:
    if message is None or "import torch" not in code or importlib.util.find_spec("torch"):
        message = said_of(code)
    return f"{code}```\n\n```text\n{message.rstrip()}\n```\n"


def said_of(code: str) -> str:
    """The type and the text of what a program raises, or warns of; of JAX's own error, what jaxfn adds."""
    module = ModuleType("train")  # one that messages can name functions of
    exec(IMPORTS, vars(module))
    sys.modules["train"] = module
    linecache.cache["train.py"] = (len(code), None, code.splitlines(keepends=True), "train.py")
    try:
        with warnings.catch_warnings(action="error"):
            exec(compile(code, "train.py", "exec"), vars(module))
    except Exception as error:
        text = str(error)
        if isinstance(error, jax.errors.JAXTypeError):  # which each version of JAX words otherwise
            text = "...\n" + text[text.index("\nIn ") + 1 :]
        return f"{type(error).__name__}: {text}"
    finally:
        del linecache.cache["train.py"], sys.modules["train"]
    raise AssertionError(f"this raises nothing:\n{code}")


if __name__ == "__main__":
    PAGE.write_text(gallery(PAGE.read_text()))
