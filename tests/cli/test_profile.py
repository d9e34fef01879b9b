"""`--profile FIRST:END`: traces of exactly these steps."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from command_line import Drive

from drivetrain.kernel.errors import SettingError
from drivetrain.trainer.profiler import parse_steps


def spans(path: Path) -> tuple[list[str], set[str]]:
    """Return the steps in a trace, and the names of all its events."""
    with gzip.open(path) as stream:
        found: list[dict[str, Any]] = json.load(stream)["traceEvents"]
    names = [str(event.get("name")) for event in found]
    steps = {name for name in names if name.startswith("step ")}
    return sorted(steps, key=lambda name: int(name.split()[1])), set(names)


def test_these_steps_are_profiled(drive: Drive, recipe: Path, tmp_path: Path) -> None:
    ran = drive(
        "train", recipe, "--backend", "cpu", "--profile", "3:5", "--out", "run", COLUMNS="80"
    )
    assert ran.code == 0, ran.stderr
    (trace,) = (tmp_path / "run" / "profile").iterdir()
    assert trace.name == "steps-3-4.rank-0.json.gz"
    steps, names = spans(trace)
    assert steps == ["step 3", "step 4"]
    assert {"aten::linear", "[memory]"} <= names
    assert "steps 3 to 4 profiled: run/profile/steps-3-4.rank-0.json.gz" in ran.stdout
    table = ran.stdout[ran.stdout.index("costliest operations") :].splitlines()
    assert any(line.startswith("aten::") and line.endswith("%") for line in table)


def test_a_run_that_ends_before_writes_what_there_is(
    drive: Drive, recipe: Path, tmp_path: Path
) -> None:
    given = ("train", recipe, "--backend", "cpu", "--profile", "5:90", "--json")
    ran = drive(*given, "--out", "run")
    assert ran.code == 0, ran.stderr
    (record,) = [record for record in ran.records() if record["event"] == "profiled"]
    assert (record["first"], record["step"]) == (5, 6)
    assert spans(tmp_path / record["path"])[0] == ["step 5", "step 6"]
    recipe.write_text(recipe.read_text().replace(FETCHED, BROKEN))
    assert drive("train", recipe, *given[2:-1], "--out", "broken").code == 1
    (trace,) = (tmp_path / "broken" / "profile").iterdir()
    assert spans(trace)[0] == ["step 5"]


FETCHED = """    def __getitem__(self, index):
"""
BROKEN = f"""{FETCHED}\
        self.taken = getattr(self, "taken", 0) + 1
        if self.taken > 26:  # of which 8 before the first step
            raise ValueError("a damaged sample")
"""


def test_a_run_that_resumes_after_it_says_so(drive: Drive, recipe: Path, tmp_path: Path) -> None:
    given = ("--backend", "cpu", "--out", "run")
    assert drive("train", recipe, *given, "--steps", "4").code == 0
    again = drive("train", recipe, *given, "--resume", "auto", "--steps", "6", "--profile", "3:5")
    assert again.code == 0, again.stderr
    assert "step 3 was done before this run" in again.stdout
    assert not (tmp_path / "run" / "profile").exists()
    at_once = ("--resume", "auto", "--steps", "8", "--profile", "7")
    assert drive("train", recipe, *given, *at_once).code == 0
    (trace,) = (tmp_path / "run" / "profile").iterdir()
    assert spans(trace)[0] == ["step 7"]


def test_a_trace_that_cannot_be_written_ends_no_run(
    drive: Drive, recipe: Path, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile").symlink_to("/dev/full")
    ran = drive(
        "train", recipe, "--backend=cpu", "--profile=3:5", "--out=run", "--resume=auto", "--json"
    )
    assert ran.code == 0, ran.stderr
    (reported,) = [record["message"] for record in ran.records() if record["event"] == "warned"]
    assert "steps-3-4.rank-0.json.gz cannot be written" in reported
    assert ran.records()[-1]["step"] == 6


@pytest.mark.slow
def test_each_rank_writes_its_own(drive: Drive, recipe: Path, tmp_path: Path) -> None:
    ran = drive(
        "train", recipe, "--backend", "ddp", "--nproc", "2", "--profile", "2:4", "--out", "run"
    )
    assert ran.code == 0, ran.stderr
    written = sorted(path.name for path in (tmp_path / "run" / "profile").iterdir())
    assert written == ["steps-2-3.rank-0.json.gz", "steps-2-3.rank-1.json.gz"]


@pytest.mark.parametrize("text", ["x", "1:x", "0:3", "5:5", "7:3", ":"])
def test_what_are_no_steps_is_refused(
    drive: Drive, recipe: Path, tmp_path: Path, text: str
) -> None:
    ran = drive("train", recipe, "--profile", text, "--out", "run")
    assert ran.code == 2
    assert "10:13" in ran.stderr
    assert not (tmp_path / "run").exists()


def test_steps_are_read() -> None:
    assert parse_steps("10:13") == (10, 13)
    assert parse_steps("10") == (10, 11)
    with pytest.raises(SettingError, match="FIRST:END"):
        parse_steps("a")
