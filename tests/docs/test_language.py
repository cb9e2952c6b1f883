"""Code, tests and pages use the field's own terms (JAX's; torch's where user code meets torch's protocol)."""

import ast
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")]
CODE = [*(ROOT / "jaxfn").rglob("*.py")]
TESTS = [
    path
    for folder in ("tests", "docs/scripts")
    for path in (ROOT / folder).rglob("*.py")
    if path != Path(__file__)  # which quotes the terms
]

# Home-made terms, and the ones to write instead.
HOME_MADE = {
    r"written down|writ(?:es|ing|ten) a program|written into (?:a|the) program": "staged to a jaxpr, traced",
    r"carr(?:y|ies|ied|ying) out": "evaluate, execute",
    r"(?:take|takes|taken|took) apart|put(?:s|ting)? together": "flatten, unflatten",
    r"(?:take|takes|taken|taking|took) off|put(?:s)? back on": "bypass (a rule), stop (a gradient), remove",
    r"further out\b|further in\b": "enclosing",
    r"stand-ins?|stands? in for|stood in|stands? for": "substitute, represent, replace",
    r"in the midst": "inside",
    r"out of reach": "escaped",
    r"refus(?:e|es|ed|al|als|ing)": "raise, reject, is not supported",
    r"cures?|cured": "hint, fix",
    r"hears?|(?:is|are|was|were) told|told apart": "receives, is distinguished",
    r"whole numbers?|truth values?": "integer, boolean",
    r"numbers? of (?:64|32) bits": "int64, int32",
    r"(?:in|of) the same memory": "aliases, shares storage",
    r"made outside|from outside": "external",
    r"tak(?:e|es|en) over": "convert, is supported",
    r"adopt(?:s|ed|ing|ion)?": "convert",
    r"canary|wishes|bench|verdicts? of": "self-test, options, comparison",
    r"judg(?:e|es|ed|ing)": "check, compare",
    r"coming (?:implementations?|custom_vjp)": "experimental implementation",
    r"by hand": "hand-written",
    r"besides?": "next to, together with, in addition",
    r"in force|at hand": "active, available",
    r"of (?:its|their|your|his) own": "separate, its own X",
    r"by (?:itself|themselves)": "automatically, alone",
    r"somebody|nobody|whoever": "the caller, the user, unused",
    r"once more|anew|in words|for people": "again, from scratch, as text",
    r"floors|the ground": "layers",
    r"lanes?": "test tier",
    r"likewise": "name the object again",
    r"(?<!there )(?<!There )\b(?:is|are) no (?!longer|more\b)": "is not a",
    r"inside of|outside of": "inside, outside",
    r"kept": "saved, residual, stored, cached, captured",
    r"(?<!in )(?<!in-)(?<!last )(?<!decimal )\bplaces?\b(?! of\b)": "index, position, location",
    r"(?:is|are|was|were|been) given|as given|given (?:by|to|as)": "passed, received; args, operands, cotangents",
    r"(?:is|are|was|were|been) made(?! to\b)|made (?:by|of|from|again|here|inside)": "created, computed, built",
    r"(?:\bthe same)(?: of\b| by\b|[.,;:)])": "name the object again",
}
# Quotations of torch, names of APIs, and numbers of bits in a format.
QUOTED = re.compile(r"`[^`\n]*`|\"by hand\"")

OPENINGS = re.compile(r"(What|Of|That which|The same|Those|How|For|By|Which|As|In|Likewise|Where|If|To|With|See)\b")


DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef


def prose(path: Path) -> list[tuple[int, str]]:
    """Returns the lines of a page without code blocks, or all lines of a module, with their numbers."""
    lines = path.read_text().splitlines()
    if path.suffix == ".py":
        return list(enumerate(lines, 1))
    found, is_code = [], False
    for number, line in enumerate(lines, 1):
        if line.startswith("```"):
            is_code = not is_code
        elif not is_code:
            found.append((number, line))
    return found


def prose_of_tests(path: Path) -> list[tuple[int, str]]:
    """Returns comments, docstrings and the names of functions and classes: strings may quote messages and torch."""
    with tokenize.open(path) as file:
        tokens = list(tokenize.generate_tokens(file.readline))
    found = [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, DOCUMENTED):
            if not isinstance(node, ast.Module):
                found.append((node.lineno, node.name.replace("_", " ")))
            if doc := ast.get_docstring(node, clean=False):
                found.extend(enumerate(doc.splitlines(), node.body[0].lineno))
    return found


def test_no_home_made_terms():
    patterns = {re.compile(rf"\b(?:{term})\b" if term[0] != "(" else rf"{term}", re.I): term for term in HOME_MADE}
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]!r}: write {HOME_MADE[term]}"
        for path, lines in [*((p, prose(p)) for p in (*CODE, *PAGES)), *((p, prose_of_tests(p)) for p in TESTS)]
        for number, line in lines
        for pattern, term in patterns.items()
        if (match := pattern.search(QUOTED.sub("", line)))
    ]
    assert not found, "\n" + "\n".join(found)


def test_docstrings_open_with_a_verb_or_a_noun():
    """A docstring stands alone: it does not continue the name."""
    found = [
        f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}: {doc.splitlines()[0]}"
        for path in (*CODE, *TESTS)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, DOCUMENTED) and (doc := ast.get_docstring(node)) and OPENINGS.match(doc)
    ]
    assert not found, "\n" + "\n".join(found)
