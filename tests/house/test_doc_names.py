"""Files, tests and names of drivetrain exist if a page has them in backticks."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from house_rules import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
BASES = (ROOT, ROOT / "runtime", ROOT / "compat")
"""Folders that paths on pages are relative to."""
FOLDERS = {path.name for base in BASES for path in base.iterdir() if path.is_dir()}
ELSEWHERE = {"kernel/cli.py", "checkpoints/checkpoint-000100/"}
"""A path that a decision gives as it was before, and one of a run folder."""
FILE = re.compile(r"((?:[\w.-]+/)+[\w.-]*)(?:::(\w+).*)?")
NAME = re.compile(r"drivetrain(?:\.\w+)+")
GROUPS = re.compile(r"drivetrain\.(storage|backends)")
"""Entry-point groups, which are no modules."""


def quoted(page: Path) -> list[str]:
    """Return the words in backticks, outside of blocks of code."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    return re.findall(r"`([^`\n]+)`", text)


def is_there(path: str, test: str | None) -> bool:
    found = [base / path for base in BASES if (base / path).exists()]
    return bool(found) and (test is None or test in found[0].read_text())


def can_be_imported(name: str) -> bool:
    """Return True if the longest possible part of a dotted name is a module that has the rest."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        return  # it names what was
    stale = []
    for words in quoted(page):
        file, name = FILE.fullmatch(words), NAME.fullmatch(words.partition("(")[0])
        if file is not None and file[1].split("/")[0] in FOLDERS and file[1] not in ELSEWHERE:
            stale += [] if is_there(file[1], file[2]) else [words]
        elif name is not None and not GROUPS.fullmatch(name[0]):
            stale += [] if can_be_imported(name[0]) else [words]
    assert not stale
