"""Nothing printed for people is truncated: it is folded at 80 columns, and whole in a pipe."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from drivetrain.cli.report.backends import backend_records, show_backends
from drivetrain.cli.report.checkpoints import show
from drivetrain.cli.settings.explain import explain, show_explanation
from drivetrain.registry import install_hint
from drivetrain.run.tables import open_console

NAME = ".".join(["a_module_of_a_long_name"] * 8)
TENSOR = {"dtype": "float32", "shape": [123456, 1024], "bytes": 1}
RECORD: dict[str, Any] = {
    "path": "runs/" + NAME,
    "step": 123456789,
    "driver": "deepspeed",
    "world_size": 512,
    "num_bytes": 123456789012,
    "shared_bytes": 98765432101,
    "files": ["one"],
    "tied": [[NAME, NAME + ".weight"]],
    "tensors": {"weights": {NAME: TENSOR}, "optimizer": {}, "state": {}},
}


def printed(show: Any, *arguments: Any, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    show(*arguments, console)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def whole(text: str) -> str:
    """Remove the white space that folding adds."""
    return "".join(text.split())


def test_explain_at_80_columns() -> None:
    text = printed(show_explanation, explain(None, ["cpu", "deepspeed"], [], 1), width=80)
    assert "…" not in text
    assert "deepspeed" in text
    (line,) = [line for line in text.splitlines() if line.startswith("cpu ")]
    assert line.split()[1:11:2] == ["10.9", "0", "21.7", "2.1", "92.6"]  # no gradient at that time
    assert line.split()[2:12:2] == ["MB", "B", "MB", "MB", "MB"]


def test_backends_at_80_columns() -> None:
    records = backend_records()
    text = printed(show_backends, records, width=80)
    assert "…" not in text
    for record in records:
        for part in (record["name"], record["reason"], record["install"]):
            assert whole(install_hint(part)) in whole(text)


@pytest.mark.parametrize("width", [40, 80, 10_000])
def test_inspect_shows_whole_names_and_figures(width: int) -> None:
    text = printed(show, RECORD, width=width)
    assert "…" not in text
    cells = [line.split(" ")[0] for line in text.partition("─\n")[2].splitlines()]
    assert NAME in "".join(cells)
    assert "126,418,944" in text or width == 40
    assert whole("123456.8 MB in 1 files, 98765.4 MB of it linked to by others") in whole(text)


def test_a_pipe_gets_a_row_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    console = open_console()
    console.file = io.StringIO()
    show(RECORD, console)
    (line,) = [line for line in console.file.getvalue().splitlines() if line.endswith("944")]
    assert line.split() == [NAME, "float32", "123456", "x", "1024", "126,418,944"]
