"""Hooks of mkdocs: pages of the examples, from the files themselves, and of the notebook."""

from __future__ import annotations

import ast
import json
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
ACRONYMS = {"crf", "lapack", "nnx", "ode"}
FOLDERS = {  # of examples: title and first sentence
    "examples": ("Examples", "Programs that train, and print what they claim."),
    "examples/journeys": ("Journeys", "Whole programs, each ending with a picture or a table."),
    "examples/kernels": ("Kernels", "Kernels as Functions, with plain JAX for comparison."),
    "examples/cookbook": ("Cookbook", "Short recipes, each compared with something independent."),
}


def on_config(config: MkDocsConfig) -> None:
    """Puts the examples before the last two sections, with kernels and the cookbook inside."""
    assert config.nav is not None
    examples, *inner = ([name for name, _ in pages(folder)] for folder in FOLDERS)
    titles = [title for title, _ in FOLDERS.values()]
    sections = [{title: names} for title, names in zip(titles[1:], inner, strict=True) if names]
    config.nav.insert(-2, {titles[0]: [*examples, *sections]})


def on_files(files: Files, *, config: MkDocsConfig) -> None:
    """Adds the generated pages."""
    for folder in FOLDERS:
        for name, content in pages(folder):
            files.append(File.generated(config, name, content=content))
    files.append(File.generated(config, "reports.md", content=notebook_page(ROOT / "docs" / "reports.ipynb")))


def pages(folder: str) -> list[tuple[str, str]]:
    """Returns names and contents of the pages of a folder of examples; the first lists the others."""
    paths = [path for path in sorted((ROOT / folder).glob("*.py")) if path.stem != "__init__"]
    if not paths:
        return []
    title, words = FOLDERS[folder]
    rows = [f"| [{_title(path)}]({path.stem}.md) | {_split(path)[0].splitlines()[0]} |" for path in paths]
    index = "\n".join([f"# {title}", "", words, "", "| File | Content |", "|---|---|", *rows, ""])
    return [(f"{folder}/index.md", index), *((f"{folder}/{path.stem}.md", _page(path)) for path in paths)]


def notebook_page(path: Path) -> str:
    """Returns the page of an executed notebook."""
    parts: list[str] = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            parts.append(f'<div class="output">\n{"".join(output["data"]["text/html"])}\n</div>')
    return "\n\n".join([*parts, f"[The notebook]({path.name})"])


def _page(path: Path) -> str:
    """Returns the page of a file: its docstring, its picture if it has one, and its code."""
    words, code = _split(path)
    name = path.relative_to(ROOT).as_posix()
    picture = ROOT / "docs" / "pictures" / f"{path.stem}.svg"
    up = "../" * len(path.relative_to(ROOT).parent.parts)
    shown = (
        f"![{_title(path)}]({up}pictures/{picture.name})\n\n" if "journeys" in path.parts and picture.exists() else ""
    )
    return f'---\nhide: [toc]\n---\n\n# {_title(path)}\n\n{words}\n\n{shown}```python title="{name}"\n{code}\n```\n'


def _split(path: Path) -> tuple[str, str]:
    source = path.read_text()
    tree = ast.parse(source)
    words = ast.get_docstring(tree)
    assert words, f"{path} has no docstring"
    end = tree.body[0].end_lineno
    return words, "\n".join(source.splitlines()[end:]).strip("\n")


def _title(path: Path) -> str:
    words = " ".join(word.upper() if word in ACRONYMS else word for word in path.stem.split("_"))
    return words[0].upper() + words[1:]
