"""Commands that a run suggests begin as the command that started it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain.cli.process import program

REPORT = (
    "import json; from drivetrain.cli.process.program import program; print(json.dumps(program()))"
)


def test_started_by_uv(tmp_path: Path) -> None:
    child = [sys.executable, "-c", REPORT, "train", "my recipe.py"]
    parent = f"import subprocess; subprocess.run({child!r}, check=True)"
    ran = subprocess.run(
        ["/some/where/uv", "-c", parent, "train", "my recipe.py"],
        executable=sys.executable,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(ran.stdout) == ["uv", "-c", parent]


def test_started_as_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main = Path(program.__file__).parents[1] / "__main__.py"
    monkeypatch.setattr(sys, "argv", [str(main), "train"])
    monkeypatch.setattr(sys, "orig_argv", ["python3", "-m", "drivetrain.cli", "train"])
    assert program.program() == ["python3", "-m", "drivetrain.cli"]


def test_started_as_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "a b" / "drivetrain"
    script.parent.mkdir()
    shutil.copy(sys.executable, script)
    monkeypatch.setattr(sys, "argv", [str(script), "train"])
    assert program.program() == [str(script)]
    monkeypatch.setenv("PATH", str(script.parent))
    assert program.program() == ["drivetrain"]


def test_ranks_report_the_command_of_their_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIVETRAIN_PROGRAM", "uv run 'my env' drivetrain")
    assert program.program() == ["uv", "run", "my env", "drivetrain"]
