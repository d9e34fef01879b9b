"""Hints for installing a package match the way in which the command was started."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain.registry import install_hint

OURS = '[project]\nname = "drivetrain"\n'
EXTRA = "pip install 'drivetrain[xla]'"


@pytest.mark.parametrize(
    ("by_uv", "project", "command", "expected"),
    [
        (False, OURS, EXTRA, EXTRA),
        (True, OURS, EXTRA, "uv run --extra xla ..."),
        (True, '[project]\nname = "mine"\n', EXTRA, "uv add 'drivetrain[xla]'"),
        (True, None, "pip install torch", "uv add torch"),
        (True, OURS, "apt install it", "apt install it"),
        (True, OURS, "", ""),
    ],
)
def test_the_hint(
    by_uv: bool,
    project: str | None,
    command: str,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if by_uv:
        monkeypatch.setenv("UV_RUN_RECURSION_DEPTH", "1")
    else:
        monkeypatch.delenv("UV_RUN_RECURSION_DEPTH", raising=False)
    if project is not None:
        (tmp_path / "pyproject.toml").write_text(project)
    folder = tmp_path / "below"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert install_hint(command) == expected
