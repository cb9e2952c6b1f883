"""Files of a port: the rewritten source of torch code, the results of torch, and a test that compares them."""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import jaxfn

_TEST = '''"""Compares {module}.py with the results of torch, recorded in {module}*.npz. torch is not needed."""

from pathlib import Path
{imports}
from {module} import {name}

REFERENCES = sorted(Path(__file__).parent.glob("{module}*.npz"))


@pytest.mark.parametrize("reference", REFERENCES, ids=lambda path: path.stem)
def test_parity_with_torch(reference):
    assert jaxfn.paritycheck({name}, reference)


{skip}def test_gradients():
    recorded = np.load(REFERENCES[0])
    assert jaxfn.gradcheck({call}, ({arguments}))
'''
_RANDOM_TEST = '''"""Tests {module}.py, which draws random numbers, so that its results are not those of torch."""
{imports}
from {module} import {name}


def test_equal_keys_give_equal_numbers():
    generator = np.random.default_rng(0)
    arguments = ({arguments})
    first, second = ({call}(*arguments, key=jax.random.key(0)) for _ in range(2))
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(a, b)
'''


class Port(NamedTuple):
    """The written files, and what the test that was written skips or will report.

    Attributes:
      files: The paths of the module, its test, and the recorded results.
      notes: What does not hold, in one line each.
      passed: Whether the port agrees with torch.
    """

    files: list[Path]
    notes: list[str]
    passed: bool = True


def write_port(original: Any, examples: Sequence[Sequence[Any]], path: Path, *, replace: bool = False) -> Port:
    """Writes the rewritten source of a torch Function or function to `path`, next to it a test and results of torch.

    Raises:
      FileExistsError: A file exists, and is not to be replaced.
      TranslationError: The source cannot be rewritten.
      TypeError: An argument cannot be recorded.
      ValueError: The file is not a module.
    """
    test = path.with_name(f"test_{path.name}")
    references = [path.with_name(f"{path.stem}{f'_{i}' if i else ''}.npz") for i in range(len(examples))]
    if path.suffix != ".py" or not path.stem.isidentifier():
        raise ValueError(f"{path} is not a module that its test can import: pass a name such as my_port.py")
    for file in () if replace else (path, test, *references):
        if file.exists():
            raise FileExistsError(f"{file} exists. --force replaces it, its test and its recorded results")
    text = jaxfn.port(original, *examples[0], examples=examples[1:])
    path.write_text(text)
    name = original.__name__
    is_class = isinstance(original, type)
    values = {"module": path.stem, "name": name, "call": f"{name}.apply" if is_class else name}
    if "key=None" in text:
        values["imports"] = "\nimport jax\nimport numpy as np\n"
        test.write_text(_RANDOM_TEST.format(arguments=_arguments(examples[0], is_recorded=False), **values))
        return Port([path, test], [f"{name} draws random numbers: its results are not compared with those of torch"])
    for example, reference in zip(examples, references, strict=True):
        jaxfn.record_reference(original, example, reference)
    port = runpy.run_path(str(path), run_name=path.stem)[name]
    reports = [jaxfn.paritycheck(port, reference, raise_exception=False) for reference in references]
    notes = [f"paritycheck: {str(report).splitlines()[0]}" for report in reports if not report]
    reason = _gradcheck_error(port.apply if is_class else port, examples[0])
    skip = "" if reason is None else f"@pytest.mark.skip(reason={reason!r})\n"
    notes += [] if reason is None else [f"test_gradients of {test} is skipped: {reason}"]
    imports = "\nimport numpy as np\nimport pytest\n\nimport jaxfn"
    arguments = _arguments(examples[0], is_recorded=True)
    test.write_text(_TEST.format(skip=skip, imports=imports, arguments=arguments, **values))
    return Port([path, test, *references], notes, all(reports))


def _gradcheck_error(function: Any, example: Sequence[Any]) -> str | None:
    """Returns why `gradcheck` fails: for a surrogate gradient, for example, as in the torch code."""
    try:
        doubles = tuple(
            x.astype(np.float64) if getattr(getattr(x, "dtype", None), "kind", "") == "f" else x for x in example
        )
        reason = "backward is not the derivative of forward. If that is deliberate (straight-through), use surrogate="
        return None if jaxfn.gradcheck(function, doubles, raise_exception=False) else reason
    except Exception as error:  # gradcheck, or the function in double precision, raises anything.
        return (str(error).splitlines() or [type(error).__name__])[0]


def _arguments(example: Sequence[Any], *, is_recorded: bool) -> str:
    """Returns the arguments of a call as code, with arrays from the recorded file or random ones."""
    texts: list[str] = []
    num_arrays = 0
    for value in example:
        if isinstance(value, (np.ndarray, np.generic)):
            random = f"generator.random({value.shape}).astype({str(value.dtype)!r})"
            to_double = ".astype(np.float64)" * (value.dtype.kind == "f")
            texts.append(f'recorded["input/{num_arrays}"]{to_double}' if is_recorded else random)
            num_arrays += 1
        else:
            texts.append(repr(value))
    return "".join(f"{text}, " for text in texts).removesuffix(" ")
