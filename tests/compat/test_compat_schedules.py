"""The learning rates of every schedule, compared with those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from side_by_side import Classifier, both, losses
from torch.optim import SGD
from transformers import get_scheduler as theirs
from transformers.optimization import Adafactor, AdafactorSchedule

from drivetrain.compat.common.json_state import from_plain, to_plain
from drivetrain.compat.optim.schedules import follows_a_metric, get_scheduler

CASES: list[tuple[str, dict[str, Any]]] = [
    ("linear", {}),
    ("cosine", {}),
    ("cosine", {"num_cycles": 1.5}),
    ("cosine_with_restarts", {"num_cycles": 3}),
    ("polynomial", {}),
    ("polynomial", {"lr_end": 1e-3, "power": 2.0}),
    ("constant", {}),
    ("constant_with_warmup", {}),
    ("inverse_sqrt", {}),
    ("inverse_sqrt", {"timescale": 7}),
    ("cosine_with_min_lr", {"min_lr": 0.01}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.2, "num_cycles": 1.0}),
    ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.2}),
    ("cosine_warmup_with_min_lr", {"min_lr": 0.01, "warmup_lr_rate": 0.1}),
    ("warmup_stable_decay", {"num_decay_steps": 5}),
    ("warmup_stable_decay", {"num_decay_steps": 5, "min_lr_ratio": 0.1, "decay_type": "1-sqrt"}),
    ("warmup_stable_decay", {"num_decay_steps": 5, "warmup_type": "1-sqrt", "num_cycles": 1.0}),
    (
        "warmup_stable_decay",
        {"num_decay_steps": 4, "warmup_type": "cosine", "decay_type": "linear"},
    ),
]


def optimizer(lr: float = 0.1) -> SGD:
    return SGD([{"params": [torch.nn.Parameter(torch.zeros(1))]}], lr=lr)


def rates(make: Any, name: str, options: dict[str, Any], warmup: int) -> list[float]:
    weights = optimizer()
    scheduler = make(
        name,
        weights,
        num_warmup_steps=warmup,
        num_training_steps=20,
        scheduler_specific_kwargs=options,
    )
    seen = []
    for _ in range(26):
        seen.append(weights.param_groups[0]["lr"])
        weights.step()
        scheduler.step()
    return seen


@pytest.mark.row("O19", "O21")
@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.parametrize("warmup", [0, 1, 6])
def test_rates_are_those_of_transformers(name: str, options: dict[str, Any], warmup: int) -> None:
    assert rates(get_scheduler, name, options, warmup) == rates(theirs, name, options, warmup)


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_a_schedule_writes_rates_as_torchs_own_does(kind: Any) -> None:
    schedules = []
    for library in (get_scheduler, theirs):
        groups = [
            {"params": [torch.nn.Parameter(torch.ones(1))], "lr": kind(r)} for r in (1.0, 2.0)
        ]
        schedules.append(library("linear", SGD(groups), num_warmup_steps=2, num_training_steps=6))
    ours, other = schedules
    for _ in range(7):
        for schedule in schedules:
            schedule.optimizer.step()
            schedule.step()
        assert ours.get_last_lr() == other.get_last_lr()
        rates = [[group["lr"] for group in each.optimizer.param_groups] for each in schedules]
        assert rates[0] == rates[1] == ours.get_last_lr()
    theirs_state, own = other.state_dict(), ours.state_dict()
    assert own.keys() == theirs_state.keys()
    assert (own["last_epoch"], own["_step_count"]) == (7, 8)
    with pytest.warns(UserWarning, match="epoch"):
        ours.step(3)
    assert ours.last_epoch == 3


@pytest.mark.row("O19")
def test_a_number_of_stable_steps_needs_no_length() -> None:
    options = {"num_decay_steps": 5, "num_stable_steps": 3}
    shared: dict[str, Any] = {"num_warmup_steps": 2, "scheduler_specific_kwargs": options}
    ours, reference = optimizer(), optimizer()
    schedulers = [get_scheduler("warmup_stable_decay", ours, **shared)]
    schedulers += [theirs("warmup_stable_decay", reference, **shared)]
    for _ in range(12):
        assert ours.param_groups[0]["lr"] == reference.param_groups[0]["lr"]
        for weights, scheduler in zip((ours, reference), schedulers, strict=True):
            weights.step()
            scheduler.step()


@pytest.mark.row("O19", "O23")
@pytest.mark.parametrize("name", ["greedy", "reduce_lr_on_plateau"])
def test_schedules_that_follow_a_metric_are_theirs(name: str) -> None:
    options = {"patience": 0, "factor": 0.5, "min_lr": 1e-3}
    ours, reference = optimizer(), optimizer()
    mine: Any = get_scheduler(name, ours, scheduler_specific_kwargs=options)
    their: Any = theirs(name, reference, scheduler_specific_kwargs=options)
    assert type(mine) is type(their) and follows_a_metric(mine)
    for metric in (3.0, 2.0, 2.5, 2.5, 4.0):
        for each in (mine, their):
            each.step(metric)
        state = json.loads(json.dumps(to_plain(mine.state_dict(), "schedule")))
        mine = get_scheduler(name, ours, scheduler_specific_kwargs=options)
        mine.load_state_dict(from_plain(state))
        assert ours.param_groups[0]["lr"] == reference.param_groups[0]["lr"]
    assert ours.param_groups[0]["lr"] < 0.1


@pytest.mark.row("O19")
@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_schedule_can_be_looked_into(name: str, options: dict[str, Any]) -> None:
    both_of = [get(name, optimizer(), 3, 20, dict(options)) for get in (get_scheduler, theirs)]
    mine, their = (scheduler.lr_lambdas[0] for scheduler in both_of)  # type: ignore[attr-defined]
    if name == "constant":
        return  # theirs is a lambda
    assert mine.args == their.args
    assert mine.keywords.items() <= their.keywords.items()


@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_schedule_goes_on_from_its_state(name: str, options: dict[str, Any]) -> None:
    weights = optimizer()
    make: Any = lambda: get_scheduler(name, weights, 3, 20, options)  # noqa: E731
    scheduler = make()
    for _ in range(7):
        weights.step()
        scheduler.step()
    state = json.loads(json.dumps(scheduler.state_dict(), allow_nan=False))
    rate = weights.param_groups[0]["lr"]
    resumed = make()
    resumed.load_state_dict(state)
    assert resumed.get_last_lr() == [rate]
    scheduler.step()
    resumed.step()
    assert resumed.get_last_lr() == scheduler.get_last_lr()


@pytest.mark.row("O20")
@pytest.mark.parametrize(
    ("name", "options", "error", "words"),
    [
        ("linear", {"num_cycles": 1}, TypeError, "'linear' does not take num_cycles"),
        ("greedy", {"num_cycles": 1}, TypeError, "it takes mode"),
        ("reduce_lr_on_plateau", {"best": 1}, TypeError, "does not take best"),
        ("warmup_stable_decay", {}, TypeError, "needs num_decay_steps"),
        (
            "warmup_stable_decay",
            {"num_decay_steps": 1, "decay_type": "x"},
            ValueError,
            "(?i)decay type",
        ),
        ("cosine_with_min_lr", {}, ValueError, "min_lr"),
        ("polynomial", {"lr_end": 1.0}, ValueError, "lr_end"),
        ("greedy", {"factor": 1.5}, ValueError, "(?i)factor"),
        ("exponential", {}, ValueError, "known are constant"),
    ],
)
def test_wrong_options_are_errors(
    name: str, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        get_scheduler(name, optimizer(), 1, 10, options)


@pytest.mark.row("O20", status="differs", note="says that a constant schedule has no options")
def test_constant_schedules_say_that_they_have_no_options(
    caplog: pytest.LogCaptureFixture,
) -> None:
    get_scheduler("constant", optimizer(), 0, 10, {"power": 2})
    assert "no effect" in caplog.text


@pytest.mark.parametrize(("name", "missing"), [("linear", "warmup"), ("cosine", "training")])
def test_missing_numbers_of_steps_are_errors(name: str, missing: str) -> None:
    with pytest.raises(ValueError, match=f"num_{missing}_steps"):
        get_scheduler(name, optimizer(), None if missing == "warmup" else 0)


@pytest.mark.row("O2", "O22")
def test_a_schedule_reads_the_gradients_of_the_update(tmp_path: Path) -> None:
    """Use Adafactor's schedule, which shows the rate that the optimizer chose for parameters that
    had a gradient.
    """
    logged = []
    for side in both(tmp_path):
        model = Classifier()
        model.load_state_dict({n: torch.full_like(p, 0.1) for n, p in model.state_dict().items()})
        optimizer = Adafactor(model.parameters(), lr=None)
        schedule = AdafactorSchedule(optimizer)
        trainer = side.trainer(lambda: model, optimizers=(optimizer, schedule), max_steps=4)  # noqa: B023
        trainer.train()
        rates = [entry.get("learning_rate") for entry in trainer.state.log_history[:-1]]
        assert rates[1] > 0 and all(p.grad is None for p in model.parameters())
        logged.append((rates, losses(trainer)))
    assert logged[0] == logged[1]
