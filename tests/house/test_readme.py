"""The README's commands are the ones that are run: its test command is the end of .ci/run."""

from __future__ import annotations

import re

from house_rules import ROOT

SET_UP = "pip install uv && "


def commands(text: str) -> list[str]:
    """Every line in a fenced block of a Markdown text, without a prompt or a comment."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line.removeprefix("$ ") for line in lines]


def last_command(script: str) -> str:
    """The last line of a shell script that does something."""
    lines = [line.strip() for line in script.splitlines()]
    return [line for line in lines if line and not line.startswith("#")][-1]


def test_ci_ends_with_the_readme_s_test_command() -> None:
    readme = commands((ROOT / "README.md").read_text())
    assert SET_UP + last_command((ROOT / ".ci" / "run").read_text()) in readme


def test_the_readme_begins_with_one_command_that_trains() -> None:
    readme = commands((ROOT / "README.md").read_text())
    assert readme[0] == SET_UP + "uv run drivetrain train"


def test_another_command_is_seen() -> None:
    assert commands("a\n```bash\n$ one  # why\ntwo\n```\nthree\n") == ["one", "two"]
    assert last_command("#!/bin/sh\nset -e\ntrue\n\n# end\n") == "true"
