"""Checkpoint folders: rotation, order, and the choice of the one to resume."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest
import torch
from transformers import trainer_utils

from drivetrain.compat.checkpoints.model_files import write_weights
from drivetrain.compat.checkpoints.rotation import (
    newest_sound,
    problem_with,
    rotate_checkpoints,
    sort_checkpoints,
)
from drivetrain.compat.names import get_last_checkpoint


def checkpoints(root: Path, numbers: list[int], *, seconds_apart: int = 10) -> Path:
    """Make folders; return them in the order in which they were written."""
    for position, number in enumerate(numbers):
        folder = root / f"checkpoint-{number}"
        folder.mkdir(parents=True)
        os.utime(folder, (1e9 + position * seconds_apart,) * 2)
    return root


def left(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in root.iterdir())


@pytest.mark.row("K9", "K23", "K24", "K25", "K27")
@pytest.mark.parametrize("seconds_apart", [10, 0])
@pytest.mark.parametrize("use_mtime", [True, False])
@pytest.mark.parametrize("best", [None, 1, 10, 99])
@pytest.mark.parametrize("limit", [None, 0, 1, 2, 3])
def test_rotation_keeps_what_theirs_keeps(
    tmp_path: Path, limit: int | None, best: int | None, use_mtime: bool, seconds_apart: int
) -> None:
    found = []
    for name, module in {"ours": None, "theirs": trainer_utils}.items():
        root = checkpoints(tmp_path / name, [99, 1, 2, 10], seconds_apart=seconds_apart)
        best_path = None if best is None else str(root / f"checkpoint-{best}")
        sort = module.sort_checkpoints if module else sort_checkpoints
        rotate = module.rotate_checkpoints if module else rotate_checkpoints
        order = [Path(path).name for path in sort(root, use_mtime=use_mtime)]
        with_best = [Path(p).name for p in sort(root, best_model_checkpoint=best_path)]
        rotate(str(root), limit, best_path, use_mtime)
        found.append((order, with_best, left(root)))
    assert found[0] == found[1]


@pytest.mark.row("K9")
def test_numbers_are_compared_as_numbers(tmp_path: Path) -> None:
    checkpoints(tmp_path, [9, 10])
    (tmp_path / "checkpoint-11-old").mkdir()
    (tmp_path / "checkpoint-12").write_text("a file")
    assert get_last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")
    assert sort_checkpoints(tmp_path)[-1] == str(tmp_path / "checkpoint-10")


@pytest.mark.row("K9", "K10")
def test_a_damaged_one_is_named_skipped_and_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints(tmp_path, [1, 2, 3, 4, 5, 6])
    for number in (1, 2, 3, 4):
        write_weights(tmp_path / f"checkpoint-{number}", {"w": torch.arange(4.0)})
    weights = tmp_path / "checkpoint-2" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-3])
    (tmp_path / "checkpoint-3" / "trainer_state.json").write_text("{")
    (tmp_path / "checkpoint-4" / "weights-00000-of-00001.safetensors").touch()
    (tmp_path / "checkpoint-5" / "manifest.json").write_text(json.dumps({"format": "other"}))
    with caplog.at_level(logging.WARNING):
        assert newest_sound(tmp_path) == str(tmp_path / "checkpoint-1")
    warned = [record.getMessage() for record in caplog.records]
    for number, reason in {
        2: "not fully covered",
        3: "trainer_state.json cannot be read",
        4: "manifest.json is missing",
        5: "manifest.json",
        6: "no weights",
    }.items():
        assert any(f"checkpoint-{number} " in line and reason in line for line in warned), reason
    assert left(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert problem_with(tmp_path / "checkpoint-7") == "there is no such folder"


@pytest.mark.row("X14", status="differs", note="checkpoints of HF's FSDP are refused, with a way")
def test_folders_of_sharded_engines_say_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model_fsdp_0").mkdir()
    assert "accelerate merge-weights" in str(problem_with(tmp_path))
    (tmp_path / "pytorch_model_fsdp_0").rmdir()
    (tmp_path / "zero_to_fp32.py").touch()
    assert "zero_to_fp32.py" in str(problem_with(tmp_path))
