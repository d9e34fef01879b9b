"""kill -9 of ranks of which each holds a part of the state (fsdp), with `recover=in_place`.

While the others hold every part, they continue from the last step. Otherwise they return to the
newest checkpoint, in their processes.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import AverageSettings, CheckpointSettings, lost_ranks

from .dying_ranks import (
    HYBRID,
    POINTS,
    SETTINGS,
    Death,
    Dying,
    check_same_course,
    each_point,
    records,
    tensors,
    train,
)


@each_point
def test_copies_continue_as_if_nothing_had_happened(
    tmp_path: Path, whole: Path, point: str
) -> None:
    death = Death(point, 8, POINTS.index(point) % 4)  # a step with a log, evaluation and save
    out = tmp_path / "run"
    assert train(out, death, nproc=4, on=HYBRID).step == 24
    check_same_course(out, whole, [death.rank])
    (reformed,) = records(out, "reformed")
    assert (reformed["world_size"], reformed["steps_back"]) == (3, 0)


def test_a_part_that_is_lost_comes_from_the_newest_checkpoint(tmp_path: Path, whole: Path) -> None:
    out = tmp_path / "run"
    deaths = [Death("forward", 6, 0), Death("backward", 15, 2)]  # the second holds one part of 3
    assert train(out, *deaths, nproc=4, on=HYBRID).step == 24
    first, second = records(out, "reformed")
    assert (first["step"], first["world_size"], first["steps_back"]) == (5, 3, 0)
    assert (second["step"], second["world_size"], second["steps_back"]) == (12, 2, 2)
    warned = [record["message"] for record in records(out, "warned")]
    assert any("when one dies, the others return to the newest" in text for text in warned)
    newest = str(out / "checkpoints" / "checkpoint-000012")
    assert any(text.endswith(f"back to {newest}") for text in warned)
    check_same_course(out, whole, [0, 2])


class ByTensor(Dying):
    """The same with an optimizer for whole tensors, which fsdp gathers in an update."""

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.Adafactor(parameters, lr=0.01)
        optimizer.register_step_pre_hook(lambda *_: self.at("update", self.step + 1))
        return optimizer


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("point", "step", "ranks", "steps_back"),
    [("update", 10, [2], 0), ("update", 8, [1, 2], 3), ("evaluation", 8, [2], 0)],
)
def test_an_update_that_failed_midway_is_not_taken_over(
    tmp_path: Path, point: str, step: int, ranks: list[int], steps_back: int
) -> None:
    """With averages of weights, which the evaluation shows. A rank that has updated some tensors
    and waits for a dead one has no state; the other copy of the model may have."""

    def die_after_the_other_copy() -> None:
        """Die once the ranks of the other copy have made the update."""
        found, deadline = lost_ranks.board(), time.monotonic() + 60
        assert found is not None
        while (point, ranks) == ("update", [2]) and time.monotonic() < deadline:
            notes = [found[0].read(number) for number in (0, 1)]
            if all(note is not None and note.step >= step for note in notes):
                break
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGKILL)

    settings = replace(SETTINGS, average=AverageSettings(decay=0.9))
    train(tmp_path / "whole", settings=replace(settings, recover="restart"), kind=ByTensor)
    out, deaths = tmp_path / "run", [Death(point, step, rank) for rank in ranks]
    how: Any = {"kind": ByTensor, "act": die_after_the_other_copy}
    assert train(out, *deaths, nproc=4, on=HYBRID, settings=settings, **how).step == 24
    assert sum(record["steps_back"] for record in records(out, "reformed")) == steps_back
    check_same_course(out, tmp_path / "whole", ranks)


def test_a_further_death_while_the_others_return(tmp_path: Path, whole: Path) -> None:
    out, deaths = tmp_path / "run", [Death("forward", 15, 0), Death("building", 14, 1)]
    assert train(out, *deaths, nproc=3, on=("fsdp", {})).step == 24
    (reformed,) = records(out, "reformed")
    assert (reformed["step"], reformed["world_size"], reformed["steps_back"]) == (12, 1, 2)
    check_same_course(out, whole, [0, 1])


def test_without_a_checkpoint_the_run_begins_again(tmp_path: Path) -> None:
    settings = replace(SETTINGS, checkpoint=CheckpointSettings(every=100), steps=8)
    train(tmp_path / "whole", settings=replace(settings, recover="restart"))
    out = tmp_path / "run"
    assert train(out, Death("forward", 6, 1), nproc=2, on=("fsdp", {}), settings=settings).step == 8
    (reformed,) = records(out, "reformed")
    assert (reformed["step"], reformed["world_size"], reformed["steps_back"]) == (0, 1, 5)
    mine, theirs = tensors(out), tensors(tmp_path / "whole")
    assert all(mine[name].allclose(tensor, rtol=1e-4, atol=1e-6) for name, tensor in theirs.items())
