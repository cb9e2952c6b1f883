"""Every example in the README, the pages and the docstrings runs, and the package is what it says it is."""

import ast
import doctest
import importlib
import importlib.util
import inspect
import itertools
import pickle
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.support.marks import HIGH_PRIMITIVES, row

ROOT = Path(__file__).parents[2]
WITH_EXAMPLES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((ROOT / "jaxfn").rglob("*.py"))
    if ">>>" in path.read_text()
]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_docstring_examples(name):
    if name.startswith(("jaxfn._torch", "jaxfn._parity", "jaxfn._port")):
        pytest.importorskip("torch")
    module = importlib.import_module(name)
    source = Path(module.__file__).read_text()
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner(optionflags=doctest.IGNORE_EXCEPTION_DETAIL)
    defined = {node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    # Without what is public, whose module is jaxfn, and which jaxfn has where another test has used it.
    found = [x for x in finder.find(module) if x.name == name or x.name[len(name) + 1 :].split(".")[0] in defined]
    for name in defined:
        if getattr(vars(module).get(name), "__module__", None) in ("jaxfn", "jaxfn.reports"):
            found += finder.find(getattr(module, name), module=False, globs=vars(module))
    tests = {test.docstring: test for test in found}.values()
    assert sum(len(test.examples) for test in tests) >= source.count(">>> ")
    for test in tests:
        runner.run(test)
    assert runner.failures == 0


def test_there_are_docstring_examples():
    names = "Function FunctionCtx function autograd_function once_differentiable gradcheck gradgradcheck GradcheckError"
    hooks = "saved_tensors_hooks save_on_host disable_saved_tensors_hooks"
    torch_tools = "from_torch explain port paritycheck trainingcheck record_reference"
    for name in (*names.split(), *hooks.split(), *torch_tools.split()):
        doc = getattr(jaxfn, name).__doc__
        assert ">>>" in doc and " counterpart: " in doc, name


def test_all_that_users_are_handed_has_a_public_name_and_a_docstring():
    namespace = {}
    exec("from jaxfn import *", namespace)
    assert set(jaxfn.__all__) <= namespace.keys()
    others = ["reports", "__version__", "VmapInfo", *["ConvertedModule"] * bool(importlib.util.find_spec("torch"))]
    assert dir(jaxfn) == sorted([*jaxfn.__all__, *others]) and len(jaxfn.__all__) <= 26
    assert len(inspect.getmembers(jaxfn)) == len(dir(jaxfn))  # as help() asks for them, where there is no torch too
    assert all(getattr(jaxfn, name).__doc__ for name in jaxfn.__all__)
    assert isinstance(jaxfn.gradcheck(lambda x: x * x, np.float64(1)), jaxfn.reports.GradcheckReport)


def test_the_module_of_everything_public_is_jaxfn():
    places = [(jaxfn, name) for name in set(dir(jaxfn)) - {"reports", "__version__"}]
    for module, name in [*places, *((jaxfn.reports, name) for name in dir(jaxfn.reports))]:
        value = getattr(module, name)
        assert value.__module__ == module.__name__ and value.__doc__, name
        assert pickle.loads(pickle.dumps(value)) is value, name


@row("L2")
def test_torchs_import_with_the_package_replaced():
    from jaxfn.function import FunctionCtx, once_differentiable  # pyright: ignore

    assert once_differentiable is jaxfn.once_differentiable and FunctionCtx is jaxfn.FunctionCtx
    assert isinstance(jaxfn.function, type) and importlib.import_module("jaxfn.function") is jaxfn
    with pytest.raises(ImportError, match="cannot import name 'nothing' from 'jaxfn'"):
        from jaxfn.function import nothing  # noqa: F401


GUESSES = """
    autograd: jaxfn.Function
    graph: jaxfn.saved_tensors_hooks
    check_grads: jaxfn.gradcheck
    custom_vjp: @jaxfn.function
    custom_jvp: @jaxfn.function
    source: jaxfn.port
    log: jaxfn.logged
    logs: jaxfn.logged
    with_logs: jaxfn.logged
    detect_anomaly: jaxfn.find_nan
    saved_residuals: jaxfn.residuals
    debug_nans: jaxfn.find_nan
    save_on_cpu: jaxfn.save_on_host
    surrogate: jaxfn.gradcheck
    straight_through: jaxfn.gradcheck
    convert: jaxfn.from_torch
    version: jaxfn.__version__
    testing: jaxfn.check
"""


@pytest.mark.parametrize("guess", textwrap.dedent(GUESSES).strip().splitlines())
def test_a_name_that_is_tried_first_raises_with_what_to_write(guess):
    name, hint = guess.split(": ")
    with pytest.raises(AttributeError, match=rf"^module 'jaxfn' has no attribute '{name}'\. .*{hint}\b.*\.$"):
        getattr(jaxfn, name)
    with pytest.raises(ImportError, match=rf"^module 'jaxfn' has no attribute '{name}'\. .*{hint}\b"):
        exec(f"from jaxfn import {name}")
    assert not hasattr(jaxfn, name) and hasattr(jaxfn, hint.split(".")[1])


def test_the_first_screens_of_help_name_everything_public():
    assert set(jaxfn.__all__) <= set(re.findall(r"\w+", jaxfn.__doc__))
    assert len(jaxfn.__doc__.splitlines()) < 60


GALLERY = ROOT / "docs" / "errors.md"  # whose programs raise: test_error_gallery.py runs them
PAGES = [ROOT / "README.md", *sorted(set((ROOT / "docs").glob("*.md")) - {GALLERY})]


def programs() -> Iterator[Any]:
    """The programs of each page, and what they print; a block that imports jax begins a new one, as a reader would.

    A program prints the comments after its `print(...)  # expected`, and the ```text block that follows.
    """
    for page in PAGES:
        found = re.findall(r"```(python|text)\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE)
        blocks = [(kind, textwrap.dedent(block)) for kind, block in found]
        beginnings = [i for i, (_, block) in enumerate(blocks) if block.startswith("import jax")]
        assert not blocks or beginnings[0] == 0, f"{page}: the first example does not import jax"
        marks = HIGH_PRIMITIVES if page.stem == "what_jax_sees" else ()
        for begin, end in itertools.pairwise([*beginnings, len(blocks)]):
            program = "\n".join(block for kind, block in blocks[begin:end] if kind == "python")
            printed = [line for kind, block in blocks[begin:end] for line in printed_by(kind, block)]
            yield pytest.param(program, printed, id=f"{page.stem}-{begin}", marks=marks)


def printed_by(kind: str, block: str) -> list[str]:
    return block.splitlines() if kind == "text" else re.findall(r"^print\(.*\)  # (.*)$", block, re.MULTILINE)


NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def assert_printed(lines: list[str], expected: list[str]) -> None:
    """Compares lines, numbers within what machines differ by; a line "..." matches any lines."""
    rest, may_skip = iter(lines), False
    for line in expected:
        if line.strip() == "...":
            may_skip = True
            continue
        texts, numbers = NUMBER.sub("0", line).split(), [float(number) for number in NUMBER.findall(line)]
        for other in rest:
            found = [float(number) for number in NUMBER.findall(other)]
            if NUMBER.sub("0", other).split() == texts and found == pytest.approx(numbers, rel=1e-4):
                break
            assert may_skip, f"the page has {line!r}, printed is {other!r}"
        else:
            raise AssertionError(f"the page has {line!r}, which is not printed")
        may_skip = False
    assert may_skip or not (left := list(rest)), f"printed is also {left}"


def test_what_a_program_prints_is_compared():
    for wrong in (["a 1.001", "b"], ["b 1", "b"], ["a 1"], ["...", "a 1"], ["b", "a 1"], []):
        with pytest.raises(AssertionError):
            assert_printed(["a  1.0", "b"], wrong)
    for right in (["a 1", "b"], ["...", "b"], ["a 1.00001", "..."], ["..."]):
        assert_printed(["a  1.0", "b"], right)


@pytest.mark.parametrize(("program", "printed"), list(programs()))
def test_examples_on_pages(program, printed, capsys):
    imports = "".join(re.findall(r"^(?:import|from) .*\n", program, re.MULTILINE))
    for package in re.findall(r"\b(torch|flax|equinox)\b", imports):  # not among the extra requirements of tests
        pytest.importorskip(package)
    exec(compile(program, "train.py", "exec"), {"__name__": "page"})
    assert_printed(capsys.readouterr().out.splitlines(), printed)


def test_what_README_says_of_hand_written_rules():
    straight_through, two = jax.custom_vjp(lambda x: jnp.round(x)), jax.custom_vjp(lambda x, w: (x * w, 2 * w))
    straight_through.defvjp(lambda x: (jnp.round(x), None), lambda _, g: (g,))
    two.defvjp(lambda x, w: (two(x, w), (x, w)), lambda saved, g: (g[0] * saved[1], g[0] * saved[0] + 2 * g[1]))

    gradient = jax.grad(lambda x: (straight_through(x) - 1) ** 2)
    assert (gradient(2.3), jax.grad(gradient)(2.3)) == (2, 0)
    mapped = jax.grad(lambda w: sum(y.sum() for y in jax.vmap(two, (0, None))(jnp.arange(3.0), w)))
    if jax.__version_info__ < (0, 11):
        assert mapped(1.0) == 21
    else:
        with pytest.raises(ValueError, match="shared across the batch"):
            mapped(1.0)


def test_readme_is_one_page_with_examples_and_commands():
    readme = (ROOT / "README.md").read_text()
    assert readme.count("```python") == 4 and len(readme.splitlines()) < 215
    assert "examples/digits.py" in readme and "pytest" in readme


def test_links_of_the_files_next_to_README_resolve():
    """Links of the site's pages are checked where it is built."""
    for page in ROOT.glob("*.md"):
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (ROOT / link).exists(), f"{page.name}: {link}"


def test_every_public_name_is_on_the_page_of_the_API():
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    names = re.findall(r"^::: jaxfn\.([\w.]+)$", pages, re.MULTILINE)
    types = re.findall(r"as (\w+)$", Path(jaxfn.reports.__file__).read_text(), re.MULTILINE)
    assert sorted(names) == sorted(
        [*jaxfn.__all__, "ConvertedModule", "VmapInfo", *(f"reports.{name}" for name in types)]
    )


def test_the_site_has_a_line_for_each_name_and_READMEs_tables(monkeypatch):
    pytest.importorskip("mkdocs")
    monkeypatch.syspath_prepend(ROOT / "docs" / "scripts")
    import site_hooks

    line = r"^\| \[`([\w.]+)`\]\(api/\w+\.md#jaxfn\.\1\) \| .+\. \| (.*) \|$"
    counterparts = dict(re.findall(line, site_hooks.all_names(), re.MULTILINE))
    assert set(jaxfn.__all__) <= counterparts.keys()
    assert counterparts["save_on_host"] == "`torch.autograd.graph.save_on_cpu`"
    assert counterparts["residuals"] == "`jax.ad_checkpoint.print_saved_residuals`"
    tables = site_hooks.which_of_these()
    assert "](examples/journeys/train.md)" in tables and "](from_pytorch.md#coming-from-r-torch)" in tables


@row("L2")
def test_import_needs_jax_and_numpy_and_tools_are_imported_when_they_are_asked_for():
    code = """
        import sys, jaxfn
        assert not {"torch", "equinox", "optax", "sklearn", "matplotlib"} & set(sys.modules)
        tools = ("_gradcheck", "_inspection", "_kernelcheck", "_parity", "_port", "_torch")
        assert not [name for name in sys.modules if name.startswith(tuple("jaxfn." + tool for tool in tools))]
        from jaxfn import gradcheck
        assert gradcheck is jaxfn.gradcheck and "jaxfn._gradcheck" in sys.modules
        try:
            jaxfn.nothing
        except AttributeError as error:
            assert "'jaxfn' has no attribute 'nothing'" in str(error)
        else:
            raise AssertionError
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_package_is_typed():
    assert files("jaxfn").joinpath("py.typed").is_file()
