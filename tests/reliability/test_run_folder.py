"""A run folder that is moved, deleted or oddly named, and the files that a kill leaves in one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drivetrain.checkpoint import CheckpointReader, checkpoints_of, newest
from drivetrain.kernel.errors import OutputError
from drivetrain.kernel.events import StepEnded, Warned
from drivetrain.trainer.fit import fit
from drivetrain.trainer.run_lock import LOCK

from .compat_runs import train_with_compat
from .runs import SETTINGS, Run, recipe

SHORT = replace(SETTINGS, steps=4)


def moved_and_linked(out: Path) -> None:
    out.rename(out.with_name("elsewhere"))
    out.symlink_to(out.with_name("elsewhere"))


def renamed(out: Path) -> None:
    out.rename(out.with_name("elsewhere"))


def trained(out: Path, act: Callable[[Path], Any] = lambda out: None, **options: Any) -> list[str]:
    """Return the warnings of a complete run that calls `act` in its second step."""
    reported: list[str] = []

    def observe(event: Any) -> None:
        if isinstance(event, StepEnded) and event.step == 2:
            act(out)
        if isinstance(event, Warned):
            reported.append(event.message)

    assert fit(recipe(), SHORT, out=out, observers=[observe], **options).step == SHORT.steps
    return reported


def test_a_folder_that_is_moved_and_linked_to(tmp_path: Path) -> None:
    assert trained(tmp_path / "run", moved_and_linked) == []
    assert newest(tmp_path / "elsewhere" / "checkpoints") is not None
    assert not (tmp_path / "elsewhere" / LOCK).exists()


@pytest.mark.parametrize("act", [shutil.rmtree, renamed])
def test_a_folder_that_goes_away_is_reported(tmp_path: Path, act: Callable[[Path], Any]) -> None:
    reported = [each for each in trained(tmp_path / "run", act) if "deleted or renamed" in each]
    assert len(reported) == 1 and str(tmp_path / "run") in reported[0]
    found = newest(tmp_path / "run" / "checkpoints")
    assert found is not None and CheckpointReader(found).manifest.step == SHORT.steps
    assert not (tmp_path / "run" / LOCK).exists()


@pytest.mark.parametrize("how", [trained, train_with_compat], ids=["native", "compat"])
def test_what_a_kill_left_is_removed_by_the_next_run(tmp_path: Path, how: Any) -> None:
    """Require the removal, even by a run that saves nothing because it resumes at its end."""
    given = (Run(), tmp_path, {}) if how is train_with_compat else (tmp_path,)
    how(*given)
    folder = checkpoints_of(tmp_path)
    (last,) = folder.glob(f"checkpoint-*{SHORT.steps if how is trained else SETTINGS.steps}")
    left = [folder / f".checkpoint-1.{role}" for role in ("removing", "writing")]
    for each in left:
        shutil.copytree(last, each)
    how(*given, **({"resume": "auto"} if how is trained else {}))
    assert last.is_dir() and not any(each.exists() for each in left)


def test_a_folder_whose_name_is_no_text(tmp_path: Path) -> None:
    out = tmp_path / os.fsdecode(b"run-\xff")
    trained(out)
    found = newest(out / "checkpoints")
    assert found is not None and CheckpointReader(found).verify() == []


def test_a_folder_that_is_a_loop_of_links(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(OutputError, match=r"a cannot be written"):
        trained(tmp_path / "a")
