"""Losses far above the usual ones are reported with their samples, and undone if the settings say
so.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Subset

from drivetrain import CheckpointSettings, DataSettings, Recipe, Settings, SpikeSettings
from drivetrain.kernel.batches import Group, Position
from drivetrain.kernel.contract import World
from drivetrain.kernel.errors import CheckpointDamaged, SettingError, TrainingDiverged
from drivetrain.kernel.events import (
    Event,
    LossSpiked,
    Request,
    RolledBack,
    StepEnded,
    StepSkipped,
    Warned,
)
from drivetrain.trainer.fit import fit
from drivetrain.trainer.setting_values import override
from drivetrain.trainer.spikes import Spikes

from .problems import Pairs, everything, recipe

POISONED = 80
"""The sample that spikes: in the 41st group of two."""

SETTINGS = Settings(
    steps=60,
    global_batch=2,
    log_every=5,
    data=DataSettings(shuffle=False),
    checkpoint=CheckpointSettings(every=10, keep_last=10),
    spikes=SpikeSettings(factor=20.0, roll_back=True),
)


def poisoned(*more: int, without: range = range(0)) -> Recipe:
    data = Pairs(200, poison=dict.fromkeys((POISONED, *more), 1000.0))
    kept = [index for index in range(200) if index not in without]
    return dataclasses.replace(recipe(), train_data=Subset(data, kept), eval_data={})


def run(what: Recipe, settings: Settings = SETTINGS, **kwargs: Any) -> tuple[Any, list[Event]]:
    events: list[Event] = []
    result = fit(what, settings, backend="cpu", observers=[events.append], **kwargs)
    return result, events


def of(kind: type, events: list[Event]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def assert_same_weights(left: Path, right: Path) -> None:
    one, other = everything(left), everything(right)
    assert not [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize(
    ("every", "back_at", "left_out"),
    [(10, 40, range(80, 82)), (25, 25, range(78, 82))],
    ids=["the step before is in the checkpoint", "and is not"],
)
def test_a_run_that_rolls_back_never_saw_the_samples(
    tmp_path: Path, every: int, back_at: int, left_out: range
) -> None:
    settings = override(SETTINGS, {"checkpoint.every": every})
    result, events = run(poisoned(), settings, out=tmp_path / "rolled")
    (spike,) = of(LossSpiked, events)
    assert spike.step == 41
    assert spike.loss > 1e5 > spike.usual
    assert spike.samples == "samples 80 to 81 of epoch 0 (80, 81)"
    (back,) = of(RolledBack, events)
    assert back.step == back_at
    assert result.step == 60
    clean, clean_events = run(poisoned(without=left_out), settings, out=tmp_path / "clean")
    assert not of(LossSpiked, clean_events)
    assert_same_weights(result.checkpoint, clean.checkpoint)


def test_what_is_left_out_stays_so_after_a_resume(tmp_path: Path) -> None:
    whole, _ = run(poisoned(), out=tmp_path / "whole")
    first = stopped_after(50, tmp_path / "parts")
    assert of(RolledBack, first[1])
    resumed, events = run(poisoned(), out=tmp_path / "parts", resume="auto")
    assert not of(LossSpiked, events)
    assert_same_weights(whole.checkpoint, resumed.checkpoint)


def test_without_roll_back_a_spike_is_reported(tmp_path: Path) -> None:
    settings = override(SETTINGS, {"spikes.roll_back": False})
    result, events = run(poisoned(), settings, out=tmp_path)
    assert [event.step for event in of(LossSpiked, events)] == [41]
    assert not of(RolledBack, events)
    assert result.step == 60


def test_without_a_checkpoint_it_goes_on() -> None:
    result, events = run(poisoned())
    assert len(of(LossSpiked, events)) == 1
    assert any("no checkpoint to roll back to" in event.message for event in of(Warned, events))
    assert result.step == 60


def test_too_many_end_the_run(tmp_path: Path) -> None:
    settings = override(SETTINGS, {"spikes.max_roll_backs": 1})
    with pytest.raises(TrainingDiverged, match=r"again after 1 roll-backs.*checkpoint-000050"):
        run(poisoned(110), settings, out=tmp_path)


def stopped_after(step: int, out: Path) -> tuple[Any, list[Event]]:
    def stop(event: Event) -> Request | None:
        return Request.STOP if isinstance(event, StepEnded) and event.step == step else None

    events: list[Event] = []
    observers = [events.append, stop]
    return fit(poisoned(), SETTINGS, backend="cpu", out=out, observers=observers), events


def test_a_stop_that_was_asked_for_meanwhile_holds(tmp_path: Path) -> None:
    result, events = stopped_after(45, tmp_path)
    assert of(RolledBack, events)
    assert (result.reason, result.step) == ("stopped", 40)


def test_samples_of_a_step_that_was_not_applied_are_named(tmp_path: Path) -> None:
    data = Pairs(50, poison={17: float("nan")})
    settings = Settings(steps=6, global_batch=8, data=DataSettings(shuffle=False))
    _, events = run(dataclasses.replace(recipe(), train_data=data), settings)
    (skipped,) = of(StepSkipped, events)
    assert skipped.samples == "samples 16 to 23 of epoch 0 (16, 17, 18, 19, 20, 21, 22, 23)"


class OneRank:
    """A session with one feeder."""

    world = World(0, 1, torch.device("cpu"), 0, 1)

    def reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def found(losses: list[float], factor: float = 6.0) -> list[int]:
    watch: Any = Spikes(SpikeSettings(factor), OneRank(), lambda *_: "")  # type: ignore[arg-type]
    for number, loss in enumerate(losses, 1):
        group = Group(Position(0, number), Position(0, number + 1), 1, 1, iter(()))
        watch.add(number, group, torch.tensor(loss))
    return [spike.step for spike in watch.find()]


def test_what_is_usual_is_learnt_first() -> None:
    assert found([1.0] * 10 + [50.0] + [1.0] * 30) == []
    assert found([1.0] * 20 + [50.0] + [1.0] * 30) == [21]


def test_noise_and_rounding_are_no_spikes() -> None:
    torch.manual_seed(0)
    assert found((2 + 0.2 * torch.randn(500)).tolist()) == []
    assert found([1.0, 1.0 + 1e-6] * 50) == []
    assert found((5 / torch.arange(1.0, 300.0)).tolist()) == []  # a falling loss


def test_a_step_that_was_not_applied_is_no_spike() -> None:
    assert found([1.0] * 30 + [float("inf"), float("nan"), 60.0]) == [33]


@pytest.mark.parametrize("value", [{"history": "x"}, {"history": [1], "left_out": [1]}, {"a": 1}])
def test_a_forged_state_is_refused(value: dict[str, Any]) -> None:
    watch = Spikes(SpikeSettings(6.0), OneRank(), lambda *_: "")  # type: ignore[arg-type]
    with pytest.raises(CheckpointDamaged, match="spikes are malformed"):
        watch.restore(value)


def test_settings_are_checked() -> None:
    with pytest.raises(SettingError, match=r"spikes\.factor is 0"):
        Settings(spikes=SpikeSettings(0.0))


def test_parameters_without_a_gradient_are_named() -> None:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(4, 1), nn.Linear(4, 1)
            self.frozen = nn.Linear(4, 1).requires_grad_(False)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            used: torch.Tensor = self.used(inputs)
            return used

    _, events = run(dataclasses.replace(recipe(), model=Spare), Settings(steps=3))
    (reported,) = of(Warned, events)
    assert "no gradient reached spare.weight, spare.bias in the first step" in reported.message
