"""A rank that the others wait for is named, with the part in which it is slower."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drivetrain.run.record_file import read_records

STEPS, SECONDS = 40, 0.05
"""Seconds that rank 1 sleeps in each step: more than a busy machine adds to most steps."""
SCRIPT = """
import os, sys, time, torch
from torch import nn
from drivetrain import Recipe, Settings, fit

kind, seconds, steps = sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
torch.set_num_threads(1)


def is_slow(part):
    return kind == part and os.environ["RANK"] == "1"


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        if is_slow("data"):
            time.sleep(seconds)
        return torch.full((4,), index / 1000)


def loss(module, batch):
    time.sleep(0.008 + (seconds if is_slow("compute") else 0))
    return module(batch).square().sum()


recipe = Recipe(lambda: nn.Linear(4, 1), loss, Rows())
settings = Settings(steps=steps, global_batch=2, log_every=10)
fit(recipe, settings, backend="ddp", nproc=2, out=sys.argv[1], progress=False)
"""


def records(
    folder: Path, kind: str, seconds: float = SECONDS, steps: int = STEPS
) -> list[dict[str, Any]]:
    command = [sys.executable, "-c", SCRIPT, str(folder), kind, str(seconds), str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return read_records(folder / "metrics.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "named"), [("compute", "forward and backward"), ("data", "fetching data")]
)
def test_a_slow_rank_is_named(tmp_path: Path, kind: str, named: str) -> None:
    found = records(tmp_path / "run", kind)
    spent = [record for record in found if record["event"] == "time_spent"][-1]
    (verdict,) = (each for each in spent["verdicts"] if each["kind"] == "rank")
    total = sum(seconds for part, seconds in spent["seconds"].items() if part != "starting")
    slept = SECONDS * spent["steps"]
    assert verdict["share"] == pytest.approx(slept / total, abs=0.2)
    assert verdict["text"].startswith("rank 1 is slower than the others, which wait for it")
    assert f"a step more in {named}" in verdict["text"]
    assert 0.6 * slept < spent["seconds"]["ranks"] < total


def test_a_much_slower_rank_is_named(tmp_path: Path) -> None:
    found = records(tmp_path / "run", "compute", seconds=0.03, steps=20)
    spent = [record for record in found if record["event"] == "time_spent"][-1]
    texts = [each["text"] for each in spent["verdicts"] if each["kind"] == "rank"]
    assert [text.startswith("rank 1 is slower") for text in texts] == [True]


@pytest.mark.slow
def test_equal_ranks_are_not_named(tmp_path: Path) -> None:
    found = records(tmp_path / "run", "", steps=60)
    spent = [record for record in found if record["event"] == "time_spent"][-1]
    assert not spent["verdicts"]
