"""A process that trains, saves and resumes many times does not hold more and more
memory or files.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # where `python -m benchmarks` is run
soak = importlib.import_module("benchmarks.soak")


@pytest.mark.slow
def test_a_short_soak_leaves_nothing_over() -> None:
    command = [sys.executable, "-m", "benchmarks.soak", "--minutes", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "1800 steps in 18 runs" in done.stdout
    assert done.stdout.count("\n| ") == 12


def measured(growing: str) -> list[Any]:
    flat = soak.Held(10**9, 8, 4, 0, 20, 8)
    rounds = 40
    extra = 10**6 if growing == "memory_bytes" else 1
    return [
        flat._replace(**({growing: getattr(flat, growing) + extra * number} if growing else {}))
        for number in range(rounds)
    ]


@pytest.mark.parametrize("growing", [*soak.LIMITS, ""])
def test_what_grows_is_reported(growing: str) -> None:
    growing_figures = soak.growth(soak.tenths(measured(growing)))
    assert [line.partition(":")[0] for line in growing_figures] == ([growing] if growing else [])


def test_a_section_is_written_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "PAGE", tmp_path / "page.md")
    (tmp_path / "page.md").write_text("# Reliability\n\nWords.\n")
    soak.keep("cpu x1", "one")
    soak.keep("ddp x2", "two")
    soak.keep("cpu x1", "three")
    sections = (tmp_path / "page.md").read_text().split("\n## ")
    assert sections[0] == "# Reliability\n\nWords.\n"
    assert [section.split("\n\n") for section in sections[1:]] == [
        ["A long life: cpu x1", "three\n"],
        ["A long life: ddp x2", "two\n"],
    ]
