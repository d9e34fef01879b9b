"""The pages of the site, as the tests read them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
FENCE = re.compile(r"^```(\w*)(?: title=\"([^\"]*)\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    number: int
    language: str
    title: str
    text: str

    @property
    def is_theirs(self) -> bool:
        """Return True for code of another library, which a page shows for comparison."""
        return self.title not in ("", "drivetrain") and not self.title.endswith(".py")


def pages() -> list[Path]:
    """Return all pages in docs/."""
    return sorted(DOCS.rglob("*.md"))


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    name = page.relative_to(ROOT).as_posix()
    found = enumerate(FENCE.findall(page.read_text()))
    return [Block(name, number, *parts) for number, parts in found]


def commands(text: str) -> Iterator[list[str]]:
    """Return the words of each `drivetrain ...` in a shell block, also after `uv run` and `&&`."""
    for line in text.replace("\\\n", " ").splitlines():
        for part in re.split(r"&& |\| |> ", line):
            words = shlex.split(part, comments=True)
            if "drivetrain" in words and words[0] in ("drivetrain", "uv"):
                yield words[words.index("drivetrain") + 1 :]
