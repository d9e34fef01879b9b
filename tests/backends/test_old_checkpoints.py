"""Checkpoints of an earlier version of drivetrain (0.1.0.dev0 of November 2026) resume.

`old_checkpoints/` holds one for each driver, with the later figures of the run that wrote it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from environments import build_all, python_of_all

from drivetrain.checkpoint import CheckpointReader
from drivetrain.conformance.crossing import Saved, crossing
from drivetrain.conformance.matrix import parse_subject
from drivetrain.conformance.state import read_all

FOLDERS = sorted(
    path.parent for path in Path(__file__).parent.glob("old_checkpoints/*/expected.json")
)


def old(folder: Path) -> tuple[str, Saved]:
    """Return the writer's subject, and the saved run that `crossing` compares a resume with."""
    reported = json.loads((folder / "expected.json").read_text())
    (checkpoint,) = folder.glob("checkpoint-*")
    state = read_all(CheckpointReader(checkpoint))
    return reported["subject"], Saved(
        reported["writer"], reported["training"], str(checkpoint), reported, state
    )


@pytest.mark.parametrize(
    "folder",
    # xla starts another process for each number of devices, and compiles again
    [
        pytest.param(f, marks=[pytest.mark.slow] * f.name.startswith(("ddp", "xla", "deepspeed")))
        for f in FOLDERS
    ],
    ids=lambda folder: folder.name,
)
def test_its_own_driver_resumes_it(folder: Path) -> None:
    build_all()
    subject, saved = old(folder)
    crossing(saved, parse_subject(subject, python_of_all()))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_another_driver_resumes_it(folder: Path) -> None:
    crossing(old(folder)[1], parse_subject("cpu"))


def test_there_are_some_of_each_layout() -> None:
    assert {folder.name.partition("x")[0] for folder in FOLDERS} >= {"cpu", "ddp", "fsdp"}
    assert len(FOLDERS) == 6
