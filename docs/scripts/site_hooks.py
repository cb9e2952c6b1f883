"""Hooks of mkdocs: pages, and parts of pages, from README, CHANGELOG, docstrings, examples and the notebook."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).parents[2]
ACRONYMS = {"crf", "lapack", "nnx", "ode"}
JOURNEYS = "examples/journeys"
FOLDERS = {  # of examples: title and first sentence
    "examples": ("Examples", "Programs that train, and print what they claim."),
    JOURNEYS: ("Journeys", "Whole programs, each ending with a comparison."),
    "examples/kernels": ("Kernels", "Kernels as Functions, with plain JAX for comparison."),
    "examples/cookbook": ("Cookbook", "Short recipes, each compared with something independent."),
}


def on_config(config: MkDocsConfig) -> None:
    """Names the version and the repository, and puts the examples before the last two sections."""
    version = re.search(r'= "(.*)"', (ROOT / "jaxfn" / "_version.py").read_text())
    assert version and config.nav is not None
    config.site_name = f"jaxfn {version[1]}"
    config.repo_url = config.repo_url or _repository()
    folders = {title: [name for name, _ in pages(folder)] for folder, (title, _) in FOLDERS.items()}
    examples = folders.pop("Examples")
    folders["Journeys"] = folders["Journeys"][:1]  # each is in the section of its topic
    config.nav.insert(-2, {"Examples": [*examples, *({title: names} for title, names in folders.items())]})


def on_files(files: Files, *, config: MkDocsConfig) -> None:
    """Adds the generated pages."""
    generated = [page for folder in FOLDERS for page in pages(folder)]
    generated.append(("reports.md", notebook_page(ROOT / "docs" / "reports.ipynb")))
    generated.append(("changelog.md", (ROOT / "CHANGELOG.md").read_text()))
    for name, content in generated:
        files.append(File.generated(config, name, content=content))


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fills in what a page has from elsewhere."""
    for place, make in {"<!-- README: which of these -->": which_of_these, "<!-- all names -->": all_names}.items():
        if place in markdown:
            markdown = markdown.replace(place, make())
    return markdown


def on_page_context(context: dict[str, Any], *, page: Page, config: MkDocsConfig, nav: Any) -> None:
    """Links the changes in the footer."""
    changes = get_relative_url("changelog.html", page.url)
    config.copyright = f'{config.site_name} · <a href="{changes}">Changes</a>'


def which_of_these() -> str:
    """Returns README's section of that title, with links to pages of the site."""
    title = "## Which of these do you want?\n"
    section = title + (ROOT / "README.md").read_text().partition(title)[2].partition("\n## ")[0]
    return re.sub(r"\]\((examples/\S+)\.py\)", r"](\1.md)", section.replace("](docs/", "]("))


def all_names() -> str:
    """Returns a table of the public names for each page of the API, from the docstrings."""
    package = griffe.load("jaxfn", search_paths=[ROOT], resolve_aliases=True, allow_inspection=False)
    parts: list[str] = []
    for name in ("functions", "checks", "inspection", "torch"):
        path = ROOT / "docs" / "api" / f"{name}.md"
        title = path.read_text().splitlines()[0].removeprefix("# ")
        parts += [f"## {title}", "", "| Name | What for | In torch or JAX |", "|---|---|---|"]
        for public in re.findall(r"^::: jaxfn\.(\S+)$", path.read_text(), re.MULTILINE):
            docstring = package[public].docstring
            assert docstring, f"{public} has no docstring"
            found = re.findall(r"^(?:Torch|JAX) counterpart: (?!none)(.*?)\.?$", docstring.value, re.MULTILINE)
            first = docstring.value.splitlines()[0]
            parts.append(f"| [`{public}`](api/{path.name}#jaxfn.{public}) | {first} | {'; '.join(found)} |")
        parts.append("")
    return "\n".join(parts)


def pages(folder: str) -> list[tuple[str, str]]:
    """Returns names and contents of the pages of a folder of examples; the first lists the others."""
    paths = [path for path in sorted((ROOT / folder).glob("*.py")) if path.stem != "__init__"]
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


def _repository() -> str | None:
    """Returns the address that this clone is of, if browsers can open it."""
    done = subprocess.run(["git", "remote", "get-url", "origin"], cwd=ROOT, capture_output=True, text=True, check=False)
    address = done.stdout.strip().removesuffix(".git")
    return address if address.startswith("https://") else None


def _page(path: Path) -> str:
    """Returns the page of a file: its docstring, its picture if it has one, and its code."""
    words, code = _split(path)
    name = path.relative_to(ROOT).as_posix()
    picture = ROOT / "docs" / "pictures" / f"{path.stem}.svg"
    up = "../" * len(path.relative_to(ROOT).parent.parts)
    has_picture = name.startswith(JOURNEYS) and picture.exists()
    shown = f"![{_title(path)}]({up}pictures/{picture.name})\n\n" if has_picture else ""
    return f'---\nhide: [toc]\n---\n\n# {_title(path)}\n\n{words}\n\n{shown}```python title="{name}"\n{code}\n```\n'


def _split(path: Path) -> tuple[str, str]:
    source = path.read_text()
    tree = ast.parse(source)
    words = ast.get_docstring(tree)
    assert words, f"{path} has no docstring"
    end = tree.body[0].end_lineno
    return words, "\n".join(source.splitlines()[end:]).strip("\n")


def _title(path: Path) -> str:
    """Returns what a journey calls itself; of other examples the name of the file."""
    if path.relative_to(ROOT).as_posix().startswith(JOURNEYS):
        return _split(path)[0].partition(":")[0]
    words = " ".join(word.upper() if word in ACRONYMS else word for word in path.stem.split("_"))
    return words[0].upper() + words[1:]
