"""Private words: the code speaks the words of its field, in names and in texts.

`WORDS` and `PHRASES` may not be parts of names that the code defines, nor `NAMES` whole names;
`TEXT` may not match in docstrings, comments and messages.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import PurePosixPath

import pytest
from house_rules import sources

NOT_YET: tuple[str, ...] = ()
"""Folders in which the words are not looked for yet. Remove a folder once it is free of them."""

WORDS = {
    **dict.fromkeys(("tell", "tells", "telling", "told"), "report, send"),
    **dict.fromkeys(("hear", "hears", "hearing", "heard"), "receive, detect, wait for"),
    **dict.fromkeys(("deal", "deals", "dealt"), "partition, assign"),
    **dict.fromkeys(("fly", "flying", "flights"), "run_schedule, runs"),
    **dict.fromkeys(("anew", "onward"), "again, next"),
    "behind": "background",
    "carried": "replicated",
    "duties": "required limits",
    "hollow": "placeholder",
    "keeper": "writer",
}
"""Parts of names, between underscores or capitals, and the field's words for them."""
PHRASES = {
    "counts once": "the weight of a sum",
    "giving up": "abort",
    "go on": "continue, resume",
    "how to": "strategy, plan",
    "layers used": "used layers",
    "let go": "free, drain, reshard",
    "take off": "run_schedule",
    "whole attention": "Ulysses attention",
    "who is where": "describe",
}
"""Parts of names that follow each other, and the field's words for them."""
NAMES = {
    "Asked": "effective arguments",
    "Left": "stage exit",
    "Line": "pipeline p2p",
    "leads": "is first of its reader",
}
TEXT = re.compile(
    r"\b(?:told|hears?|hearing|heard|dealt|hollow|anew|onward)\b"
    r"|\b(?:tells?|telling)\b(?![^.;:]*\bapart\b)"
    r"|\b(?:go|goes|going|gone|went)\s+on\b(?!\s+(?:rank|a |the |this |one|all))"
    r"|\blet(?:s|ting)?\s+go\b|\bwithout\s+a\s+word\b",
    re.IGNORECASE,
)
FORMER = {
    ("backends/common/model_state.py", "dealt_pieces"),
    ("kernel/plan.py", "counts_once"),
    ("kernel/plan.py", "leads"),
    ("runtime/data/tar_shards.py", "tell"),
}
"""Former names that still work, with a warning, and the name of a method of files."""


LAWS = {
    "tests/conformance/contract_session.py": ("", "ranks_tell_each_other"),
    "tests/conformance/law_1_absent.py": ("",),
    "tests/conformance/law_3_not_applied.py": (
        "",
        "overflow_of_a_scaled_loss_costs_its_step_alone",
        "skipped_step_is_told_and_the_clock_waits",
    ),
    "tests/conformance/law_6_memory.py": ("",),
    "tests/conformance/law_6_resume.py": ("a_run_that_saves_behind_training_is_bit_exact",),
    "tests/conformance/law_7_capabilities.py": ("one_rank_gives_up",),
}
"""Laws whose names and docstrings stay: reports in `docs/conformance` and other people's drivers
name the laws. "" is the docstring of a module.
"""
ITSELF = "tests/house/test_private_words.py"


def parts_of(name: str) -> list[str]:
    """Return the words of a name: `HeardOf_late` is heard, of, late."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    return [part.lower() for part in spaced.split("_") if part]


def remedy_for(name: str) -> str | None:
    """Return the field's words for a private name; None for a name that is fine."""
    parts = parts_of(name)
    spoken = f" {' '.join(parts)} "
    phrases = (remedy for phrase, remedy in PHRASES.items() if f" {phrase} " in spoken)
    words = (WORDS[part] for part in parts if part in WORDS)
    return NAMES.get(name) or next(phrases, None) or next(words, None)


def defined(path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the names that a module defines, its own among them, with their lines."""
    yield 1, PurePosixPath(path).stem
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr
            case ast.alias(asname=str() as name):
                yield node.lineno, name


def docstrings_of_laws(path: str, tree: ast.Module) -> set[ast.AST]:
    """Return the docstrings of a module that stay: those of `LAWS`."""
    laws = LAWS.get(path, ())
    holders = [
        node
        for node in ast.walk(tree)
        if (isinstance(node, ast.Module) and "" in laws)
        or (isinstance(node, ast.FunctionDef) and node.name in laws)
    ]
    first = [holder.body[0] for holder in holders if ast.get_docstring(holder)]
    return {statement.value for statement in first if isinstance(statement, ast.Expr)}


def texts(path: str, text: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield all strings, docstrings among them, and comments of a module, with their lines."""
    left_out = docstrings_of_laws(path, tree)
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str() as value) if node not in left_out:
                yield node.lineno, value
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def breaches(path: str, text: str) -> list[str]:
    """List the private names and words of a module, each with the field's word for it."""
    tree = ast.parse(text, path)
    names = {
        f"{path}:{line}: the name {name!r} holds a private word; say: {remedy}"
        for line, name in defined(path, tree)
        if (path, name) not in FORMER
        and name not in LAWS.get(path, ())
        and (remedy := remedy_for(name))
    }
    words = {
        f"{path}:{line}: private word {hit.group()!r} in a text"
        for line, value in texts(path, text, tree)
        for hit in TEXT.finditer(value)
    }
    return sorted(names | words)


def test_names_and_texts_are_free_of_private_words() -> None:
    left_out = (*NOT_YET, ITSELF)
    looked_at = {path: text for path, text in sources().items() if not path.startswith(left_out)}
    assert {"backends/fsdp/driver.py", "kernel/loop.py"} <= looked_at.keys()
    found = [line for path, text in looked_at.items() for line in breaches(path, text)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "planted",
    [
        "def hear(): ...",
        "def _hear_of_late(): ...",
        "class GivingUp: ...",
        "class Line: ...",
        "def act(told): ...",
        "told = 1",
        "self.tell = print",
        "for heard in (): ...",
        "from math import pi as hollow",
        "with open('a') as keeper: ...",
        "HOW_TO_STEP = 1",
        '"""Ranks that are told the reason."""',
        "f'{1}: rank 0 hears of it'",
        "pass  # begins anew",
        "raise ValueError('the run goes\\non from there')",
    ],
)
def test_a_planted_word_is_found(planted: str) -> None:
    assert breaches("kernel/planted.py", planted)


@pytest.mark.parametrize(
    "clean",
    [
        "position = file.tell()",
        "class OutlineWriter: ...",
        "def dealer_of(header, sheared): ...",
        "class TellerMachine: ...",
        "misleads = 1",
        '"""Updates 1, 2, 4 and so on, on rank 0."""',
    ],
)
def test_other_words_are_left_alone(clean: str) -> None:
    assert not breaches("kernel/clean.py", clean)


def test_a_module_is_named_in_the_words_of_its_field() -> None:
    assert breaches("backends/fsdp/how_to_step.py", "")


def test_former_names_are_still_in_use() -> None:
    known = sources()
    assert not [(p, name) for p, name in FORMER if name not in known.get(p, "")]


def test_laws_that_stay_are_still_there() -> None:
    known = sources()
    assert not [
        (path, law)
        for path, laws in LAWS.items()
        for law in laws
        if law and f"def {law}(" not in known.get(path, "")
    ]


def test_only_the_docstring_of_a_law_stays() -> None:
    law = 'def one_rank_gives_up():\n    """Require that ranks go on."""\n    said = "go on"\n'
    assert len(breaches("tests/conformance/law_7_capabilities.py", law)) == 1
    assert len(breaches("tests/conformance/law_6_memory.py", law)) == 2
