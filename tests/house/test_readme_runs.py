"""The README's own recipe trains, from Python and from the command line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from house_rules import ROOT

BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)


def test_the_python_blocks_run_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in BLOCKS:
        exec(block, names)
    assert getattr(names["result"], "reason", None) == "finished"
    assert (tmp_path / "runs" / "b" / "checkpoints").is_dir()


def test_the_recipe_runs_from_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "my_recipe.py").write_text(BLOCKS[0])
    command = [sys.executable, "-m", "drivetrain.cli", "train", "my_recipe.py"]
    options = ["--backend", "cpu", "--set", "optimizer.lr=3e-3", "--steps", "5", "--out", "runs/a"]
    run = subprocess.run(
        [*command, *options], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "runs" / "a" / "report.html").is_file()
