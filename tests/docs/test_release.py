"""The published package: its extras, its version, and the words about it."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import jaxfn

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
DISTRIBUTIONS = {"sklearn": "scikit-learn"}  # where the name to import is another one


def required(*extras: str) -> set[str]:
    """The packages that jaxfn needs with these extras."""
    found = set()
    requirements = [*PROJECT["dependencies"], *(r for e in extras for r in PROJECT["optional-dependencies"][e])]
    for requirement in requirements:
        name, others = re.match(r"([\w.-]+)(?:\[([\w,]+)\])?", requirement).groups()
        found |= required(*others.split(",")) if name == "jaxfn" else {name.lower()}
    return found


def imported(path: Path) -> set[str]:
    """The packages of others that a file imports, wherever in it."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    own = {"jaxfn", "examples", *(other.stem for other in path.parent.glob("*.py"))}
    packages = {name.split(".")[0] for name in names} - sys.stdlib_module_names - own
    return {DISTRIBUTIONS.get(name, name) for name in packages}


def test_imports_and_requirements_are_found():
    assert {"jax", "optax", "scikit-learn"} <= imported(ROOT / "examples" / "digits.py")
    assert {"jax", "torch", "optax", "entmax"} <= required("cookbook")
    assert required() == {"jax", "jaxlib", "numpy"} and "torch" not in required("examples")


def test_an_extra_has_what_the_examples_import():
    assert (
        set().union(*map(imported, EXAMPLES)) - required("cookbook") - {"matplotlib", "scipy"} == set()
    )  # the extra "plot", and what JAX needs


def test_the_first_command_needs_only_the_small_extra():
    assert imported(ROOT / "examples" / "digits.py") <= required("examples")


def test_each_classified_python_is_tested():
    classified = {c.removeprefix("Programming Language :: Python :: ") for c in PROJECT["classifiers"]} - {"3"}
    tested = set(re.findall(r"find_python (3\.\d+)", (ROOT / ".ci" / "run").read_text()))
    assert {version for version in classified if version.startswith("3.")} == tested


def test_the_version_is_in_one_file():
    assert PROJECT["dynamic"] == ["version"]
    assert "version:" not in (ROOT / "CITATION.cff").read_text().replace("cff-version:", "")
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    assert newest == jaxfn.__version__
