from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, MultiStepLR, StepLR

from drivetrain.kernel.errors import SettingError
from drivetrain.trainer.schedule import SCHEDULES, build_schedule


@pytest.mark.parametrize("warmup", [4, 0.25])
def test_warmup_is_linear_by_steps_or_by_share(warmup: float) -> None:
    factor = build_schedule("constant", total_steps=16, warmup=warmup)
    assert [factor(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear_reaches_its_final_factor() -> None:
    factor = build_schedule("linear", total_steps=10, final=0.2)
    assert factor(0) == 1.0
    assert factor(5) == pytest.approx(0.6)
    assert factor(10) == pytest.approx(0.2)


def test_cosine_is_half_way_in_the_middle() -> None:
    factor = build_schedule("cosine", total_steps=10, final=0.0)
    assert [factor(0), factor(5), factor(10)] == pytest.approx([1.0, 0.5, 0.0])


def test_warmup_stable_decay_decays_in_the_last_share_only() -> None:
    factor = build_schedule("warmup_stable_decay", total_steps=100, final=0.1, decay=0.2)
    assert factor(80) == 1.0
    assert factor(90) == pytest.approx(0.55)
    assert factor(100) == pytest.approx(0.1)


def test_inverse_sqrt_falls_with_the_root_of_the_step() -> None:
    factor = build_schedule("inverse_sqrt", total_steps=1000, warmup=16)
    assert factor(15) == 1.0
    assert factor(63) == pytest.approx(math.sqrt(16 / 64))


@pytest.mark.parametrize("warmup", [0.3, 6])
def test_one_cycle_is_that_of_torch(warmup: float) -> None:
    optimizer = torch.optim.SGD([torch.zeros(())], lr=0.1)
    theirs = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.1, total_steps=20, pct_start=0.3, cycle_momentum=False
    )
    ours = build_schedule("one_cycle", total_steps=20, warmup=warmup, final=1 / 25 / 1e4)
    for step in range(19):
        assert 0.1 * ours(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9), step
        optimizer.step()
        theirs.step()


def test_restarts_powers_and_exponentials() -> None:
    restarts = build_schedule("cosine_with_restarts", total_steps=8, cycles=2)
    assert [restarts(step) for step in (0, 2, 4, 6, 8)] == pytest.approx([1.0, 0.5, 1.0, 0.5, 0.0])
    polynomial = build_schedule("polynomial", total_steps=4, power=2.0, final=0.2)
    assert [polynomial(step) for step in (0, 2, 4)] == pytest.approx([1.0, 0.4, 0.2])
    exponential = build_schedule("exponential", total_steps=2, final=0.01)
    assert [exponential(step) for step in (0, 1, 2)] == pytest.approx([1.0, 0.1, 0.01])


@pytest.mark.parametrize(
    ("arguments", "of_torch"),
    [
        (
            {"name": "step", "step_size": 3, "gamma": 0.5},
            partial(StepLR, step_size=3, gamma=0.5),
        ),
        (
            {"name": "multistep", "milestones": (8, 0.2)},  # of 20 steps: 8 and 4
            partial(MultiStepLR, milestones=[4, 8], gamma=0.1),
        ),
    ],
)
def test_falls_at_certain_steps_are_those_of_torch(
    arguments: dict[str, Any], of_torch: Callable[[Optimizer], LRScheduler]
) -> None:
    optimizer = torch.optim.SGD([torch.zeros(())], lr=1.0)
    theirs = of_torch(optimizer)
    ours = build_schedule(total_steps=20, **arguments)
    for step in range(20):
        assert ours(step) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()


def test_after_a_warmup_steps_are_counted_from_there_and_milestones_from_the_first() -> None:
    falls = {"step": {"step_size": 4}, "multistep": {"milestones": (4, 8)}}
    for name, steps in falls.items():
        factor = build_schedule(name, total_steps=None, warmup=2, gamma=0.5, **steps)
        first = 6 if name == "step" else 4
        assert [factor(step) for step in (0, 1, first - 1, first, first + 4)] == [
            *(0.5, 1.0, 1.0, 0.5, 0.25)
        ]


@given(
    st.sampled_from(SCHEDULES),
    st.integers(1, 500),
    st.floats(0, 0.9) | st.integers(1, 600),
    st.floats(0.001, 1),
    st.floats(0.01, 1),
)
def test_factors_stay_between_zero_and_one(
    name: str, total: int, warmup: float, final: float, decay: float
) -> None:
    steps: dict[str, Any] = {"step": {"step_size": decay}, "multistep": {"milestones": (decay,)}}
    settings = {"warmup": warmup, "final": final, "decay": decay, **steps.get(name, {})}
    factor = build_schedule(name, total_steps=total, **settings)
    values = [factor(step) for step in range(total + 2)]
    assert all(0.0 <= value <= 1.0 + 1e-12 for value in values)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "cosin"}, "'cosin'; it must be one of constant, cosine"),
        ({"name": "linear", "warmup": -1}, "warmup is -1"),
        ({"name": "linear", "decay": 0.0}, "decay is 0.0"),
        ({"name": "polynomial", "power": 0.0}, "schedule.power is 0.0"),
        ({"name": "cosine_with_restarts", "cycles": 0}, "schedule.cycles 0"),
        ({"name": "exponential", "final": 0.0}, "schedule.final is 0"),
        ({"name": "step"}, "'step', and schedule.step_size is not set: set the steps at which"),
        ({"name": "multistep", "milestones": ()}, "schedule.milestones is not set"),
        ({"name": "multistep", "milestones": (4, -1)}, "milestones is 4, -1; it must be above 0"),
        ({"name": "step", "step_size": math.inf}, "schedule.step_size is inf; it must be above 0"),
        ({"name": "multistep", "milestones": (4,), "step_size": 2}, "only schedule.name=step uses"),
        ({"name": "cosine", "milestones": (4,)}, "only schedule.name=multistep uses"),
        ({"name": "step", "step_size": 2, "gamma": 1.5}, "schedule.gamma is 1.5"),
    ],
)
def test_nonsense_is_refused_by_name(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        build_schedule(total_steps=10, **arguments)  # type: ignore[arg-type]
