"""The benchmarks run, in small."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from house_rules import ROOT


def measured(benchmark: str, candidate: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.one", benchmark, candidate, "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1].partition(": ")[2])
    return figures


def test_the_kernel_does_what_the_raw_loop_does() -> None:
    ours, raw = measured("step", "kernel"), measured("step", "raw")
    assert ours["checksum"] == pytest.approx(raw["checksum"], rel=1e-6)


def test_a_load_gives_what_was_saved() -> None:
    assert measured("load", "kernel")["bytes"] < 64 << 20  # it compares sums of what it loads


def test_the_page_is_what_its_records_give() -> None:
    code = "from benchmarks import report; assert report.PAGE.read_text() == report.page()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"run `python -m benchmarks page`\n{done.stderr}"
