"""What mkdocs is to do beside reading files: pages of the examples, made of the files themselves."""

from __future__ import annotations

import ast
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
SECTIONS = {  # the folder of each, and what its first page says
    "Examples": ("examples", "Programs that train, and show what they claim."),
    "Kernels by example": ("examples/kernels", "Kernels that became Functions, beside the same in plain JAX."),
    "Cookbook": ("examples/cookbook", "Short recipes, each compared with another package."),
}


def on_config(config: MkDocsConfig) -> None:
    """Puts the pages of the examples before those on what happens."""
    sections = [{title: [page for page, _ in pages]} for title, pages in example_pages().items()]
    assert config.nav is not None
    config.nav[-2:-2] = sections


def on_files(files: Files, *, config: MkDocsConfig) -> None:
    """Adds the pages that no file is of."""
    for pages in example_pages().values():
        for name, content in pages:
            files.append(File.generated(config, name, content=content))


def example_pages() -> dict[str, list[tuple[str, str]]]:
    """For each section the names and contents of its pages, the first of which lists the others."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for title, (folder, words) in SECTIONS.items():
        paths = [path for path in sorted((ROOT / folder).glob("*.py")) if path.stem != "__init__"]
        if not paths:
            continue
        rows = [f"| [{_title(path)}]({path.stem}.md) | {_split(path)[0].splitlines()[0]} |" for path in paths]
        index = "\n".join([f"# {title}", "", words, "", "| File | What it shows |", "|---|---|", *rows, ""])
        pages = [(f"{folder}/index.md", index)]
        pages += [(f"{folder}/{path.stem}.md", _page(path)) for path in paths]
        sections[title] = pages
    return sections


def _page(path: Path) -> str:
    """The docstring of a file, then its code."""
    words, code = _split(path)
    name = path.relative_to(ROOT).as_posix()
    return f'# {_title(path)}\n\n{words}\n\n```python title="{name}"\n{code}\n```\n'


def _split(path: Path) -> tuple[str, str]:
    source = path.read_text()
    tree = ast.parse(source)
    words = ast.get_docstring(tree)
    assert words, f"{path} has no docstring"
    end = tree.body[0].end_lineno
    return words, "\n".join(source.splitlines()[end:]).strip("\n")


def _title(path: Path) -> str:
    return path.stem.replace("_", " ").capitalize()
