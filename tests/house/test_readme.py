"""The README's test command is a line of .ci/run, so that it is run."""

from __future__ import annotations

import re

from house_rules import ROOT

SET_UP = "pip install uv && "


def commands(text: str) -> list[str]:
    """Return every line in a fenced block of a Markdown text, without prompts and comments."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line.removeprefix("$ ") for line in lines]


def lines_of_pytest(script: str) -> list[str]:
    """Return the commands of a shell script that run tests."""
    return re.findall(r"^check (uv run .*\bpytest\b.*)$", script, re.MULTILINE)


def test_ci_runs_the_readme_s_test_command_and_then_a_part_of_what_is_slow() -> None:
    readme = commands((ROOT / "README.md").read_text())
    script = (ROOT / ".ci" / "run").read_text()
    quick, slow = lines_of_pytest(script)
    assert SET_UP + quick in readme
    assert slow.startswith(f'{quick} -m slow --shard "$part"')
    ((divisor, parts),) = re.findall(r"% (\d+)\)\)/(\d+)", script)
    assert divisor == parts


def test_the_readme_begins_with_one_command_that_trains() -> None:
    readme = commands((ROOT / "README.md").read_text())
    assert readme[0] == SET_UP + "uv run drivetrain train"


def test_another_command_is_seen() -> None:
    assert commands("a\n```bash\n$ one  # why\ntwo\n```\nthree\n") == ["one", "two"]
    script = "#!/bin/sh\n# pytest\ncheck uv run a\ncheck uv run b pytest -k c\n"
    assert lines_of_pytest(script) == ["uv run b pytest -k c"]
