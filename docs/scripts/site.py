"""What mkdocs is to do beside reading files: pages of the examples, made of the files themselves."""

from __future__ import annotations

import ast
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
ACRONYMS = {"crf", "lapack", "nnx", "ode"}
FOLDERS = {  # of examples: the title of each, and what its first page says
    "examples": ("Examples", "Programs that train, and show what they claim."),
    "examples/kernels": ("Kernels", "Kernels that became Functions, beside the same in plain JAX."),
    "examples/cookbook": ("Cookbook", "Short recipes, each beside something independent of it."),
}


def on_config(config: MkDocsConfig) -> None:
    """Puts the examples before the last two sections, with kernels and the cookbook inside."""
    assert config.nav is not None
    examples, *inner = ([name for name, _ in pages(folder)] for folder in FOLDERS)
    titles = [title for title, _ in FOLDERS.values()]
    sections = [{title: names} for title, names in zip(titles[1:], inner, strict=True) if names]
    config.nav.insert(-2, {titles[0]: [*examples, *sections]})


def on_files(files: Files, *, config: MkDocsConfig) -> None:
    """Adds the pages that no file is of."""
    for folder in FOLDERS:
        for name, content in pages(folder):
            files.append(File.generated(config, name, content=content))


def pages(folder: str) -> list[tuple[str, str]]:
    """Names and contents of the pages of a folder of examples, the first of which lists the others."""
    paths = [path for path in sorted((ROOT / folder).glob("*.py")) if path.stem != "__init__"]
    if not paths:
        return []
    title, words = FOLDERS[folder]
    rows = [f"| [{_title(path)}]({path.stem}.md) | {_split(path)[0].splitlines()[0]} |" for path in paths]
    index = "\n".join([f"# {title}", "", words, "", "| File | What it shows |", "|---|---|", *rows, ""])
    return [(f"{folder}/index.md", index), *((f"{folder}/{path.stem}.md", _page(path)) for path in paths)]


def _page(path: Path) -> str:
    """The docstring of a file, then its code."""
    words, code = _split(path)
    name = path.relative_to(ROOT).as_posix()
    return f'---\nhide: [toc]\n---\n\n# {_title(path)}\n\n{words}\n\n```python title="{name}"\n{code}\n```\n'


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
