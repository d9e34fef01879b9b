"""Pages are true: their code runs, their commands are understood, their files exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from pages import DOCS, ROOT, Block, blocks, commands, pages

from drivetrain.cli.app import app

SHOWN = [*pages(), ROOT / "README.md"]
RUN = [DOCS / f"{name}.md" for name in ("concepts", "migrating")] + sorted(
    (DOCS / "guides").glob("*.md")
)
"""Pages whose Python blocks are run. Other pages have tests of their own."""


def python_of(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language == "python"]


@pytest.mark.parametrize("page", [p for p in RUN if python_of(p)], ids=lambda page: page.stem)
@pytest.mark.filterwarnings("default")
def test_the_code_of_a_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = torch.get_num_threads()
    names: dict[str, Any] = {"__name__": "__main__"}  # where dataclasses look for names
    for block in python_of(page):
        code = compile(block.text, f"{page.name}, block {block.number}", "exec")
        if block.title.endswith(".py"):
            Path(block.title).write_text(block.text)
        elif not block.is_theirs or block.title == "a plain loop":
            exec(code, names)
    torch.set_num_threads(before)
    if page.stem == "migrating":
        assert_alike(names)


def assert_alike(names: dict[str, Any]) -> None:
    """Require that the plain loop and drivetrain end with the same loss, except for the order of
    samples.
    """
    inputs, targets = names["data"].tensors
    with torch.no_grad():
        plain = float((names["model"](inputs) - targets).square().mean())
    assert names["result"].step == names["validated"].step == 24
    assert names["accumulated"].step == 8
    assert names["tuned"].step == 4
    assert names["output"].global_step == 4
    assert plain == pytest.approx(names["result"].loss, rel=0.5)


def test_another_library_s_code_is_python() -> None:
    theirs = [block for page in RUN for block in python_of(page) if block.is_theirs]
    assert {block.title for block in theirs} >= {"Lightning", "Accelerate", "transformers"}
    for block in theirs:
        ast.parse(block.text)


def complaint(words: list[str]) -> str:
    """Return the command line's error for a command, without running it, or an empty string."""
    command: Any = typer.main.get_command(app)
    words = list(words)
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        if words[0] not in command.commands:
            return f"no command {words[0]}"
        command = command.commands[words.pop(0)]
    try:
        command.make_context(command.name, words)
    except Exception as error:  # of the copy of click that typer carries
        return "" if type(error).__name__ == "Exit" else str(error) or type(error).__name__
    return ""


@pytest.mark.parametrize("page", SHOWN, ids=lambda page: page.stem)
def test_the_command_line_understands_the_commands_of_a_page(page: Path) -> None:
    shell = [block.text for block in blocks(page) if block.language in ("", "bash")]
    for words in [words for text in shell for words in commands(text)]:
        assert complaint(words) == "", words


def test_a_wrong_command_is_seen() -> None:
    assert complaint(["train", "--stepz", "3"]) != ""
    assert complaint(["trian"]) != ""
    assert complaint(["train", "--steps", "many"]) != ""
    assert complaint(["train", "my.py", "--steps", "3"]) == ""
    (found,) = commands("pip install uv && uv run drivetrain train a \\\n --steps 3  # why\n")
    assert found == ["train", "a", "--steps", "3"]


def test_the_examples_that_pages_name_exist() -> None:
    for page in SHOWN:
        for name in re.findall(r"\bexamples/[\w/]+\.py", page.read_text()):
            assert (ROOT / name).is_file(), f"{page.name} names {name}"
