"""Resuming with the optimizer of a checkpoint, with another one, or with one that starts over."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from schedulefree import AdamWScheduleFree
from torch import nn

from drivetrain.checkpoint import CheckpointReader
from drivetrain.conformance.optimizers import Counting, Estimating
from drivetrain.conformance.problems import PROBLEMS, Samples
from drivetrain.kernel.errors import CheckpointMismatch, RecipeError
from drivetrain.kernel.events import Resumed
from drivetrain.trainer.fit import Result, fit
from drivetrain.trainer.setting_values import override
from drivetrain.trainer.settings import Settings

Named = Iterable[tuple[str, nn.Parameter]]


def train(
    out: Path,
    *,
    steps: int,
    build: Callable[[Named], torch.optim.Optimizer] | None = None,
    resume: Any = None,
    reported: list[str] | None = None,
    **settings: Any,
) -> Result:
    """Train; `reported` receives the notes of a resume."""

    def observe(event: object) -> None:
        if isinstance(event, Resumed) and reported is not None:
            reported.extend(event.notes)

    problem = PROBLEMS["regression"]
    given = {"steps": steps, "global_batch": 4, "schedule.name": "constant", "log_every": 1}
    return fit(
        problem.recipe(train_data=Samples("regression", 16), optimizer=build),
        override(Settings(), {**given, **{k.replace("__", "."): v for k, v in settings.items()}}),
        backend="cpu",
        out=out,
        resume=resume,
        observers=[observe],
    )


def stored(result: Result) -> dict[str, torch.Tensor]:
    reader = CheckpointReader(str(result.checkpoint))
    return {name: reader.read("optimizer", name) for name in reader.names("optimizer")}


def keys(result: Result) -> set[str]:
    return {name.rpartition("/")[2] for name in stored(result)}


OTHERS = {
    "SGD": {"optimizer__name": "torch.optim.SGD"},
    "SGD with momentum": {
        "optimizer__name": "torch.optim.SGD",
        "optimizer__args": {"momentum": 0.9},
    },
    "NAdam": {"optimizer__name": "torch.optim.NAdam"},
    "Adagrad": {"optimizer__name": "torch.optim.Adagrad"},
    "AMSGrad": {"optimizer__args": {"amsgrad": True}},
    "Adafactor": {"optimizer__name": "torch.optim.Adafactor"},
    "of no library": {"optimizer__name": "drivetrain.conformance.optimizers.Counting"},
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_optimizer_is_refused_or_starts_over(other: str, tmp_path: Path) -> None:
    train(tmp_path / "a", steps=2)
    with pytest.raises(CheckpointMismatch, match=r"resume\.optimizer=fresh"):
        train(tmp_path / "b", steps=4, resume=tmp_path / "a", **OTHERS[other])
    reported: list[str] = []
    fresh = {**OTHERS[other], "resume__optimizer": "fresh", "reported": reported}
    result = train(tmp_path / "b", steps=4, resume=tmp_path / "a", **fresh)
    assert result.step == 4
    assert "the optimizer starts over (resume.optimizer=fresh)" in reported
    assert "exp_avg" not in keys(result) or other in ("AMSGrad", "NAdam")


def test_an_optimizer_starts_over_once(tmp_path: Path) -> None:
    """Run the same command again, as a scheduler does: the optimizer must not start over twice."""
    train(tmp_path, steps=2, checkpoint__keep_last=9)
    again = {"resume": "auto", "resume__optimizer": "fresh"}
    first = train(tmp_path, steps=3, **again)
    assert stored(first)["0.weight/step"] == 1
    assert stored(train(tmp_path, steps=5, **again))["0.weight/step"] == 3


def test_the_state_of_an_optimizer_that_is_alike_is_kept(tmp_path: Path) -> None:
    train(tmp_path, steps=2)
    result = train(tmp_path, steps=3, resume="auto", optimizer__name="torch.optim.Adam")
    assert stored(result)["0.weight/step"] == 3


def test_what_has_changed_in_the_recipe_s_own_optimizer_is_reported(tmp_path: Path) -> None:
    def build(rate: float, frozen: str) -> Callable[[Named], torch.optim.Optimizer]:
        return lambda named: torch.optim.AdamW(
            [p for name, p in named if name != frozen], lr=rate, weight_decay=0.0
        )

    reported: list[str] = []
    train(tmp_path, steps=2, build=build(0.1, "0.weight"), reported=reported)
    train(tmp_path, steps=3, build=build(0.1, "0.weight"), resume="auto", reported=reported)
    assert reported == ["steps was 2, is 3"]
    train(tmp_path, steps=4, build=build(0.2, "4.bias"), resume="auto", reported=reported)
    assert "lr of the optimizer's group 0 was 0.1, is 0.2" in reported
    assert "frozen now: 4.bias" in reported
    assert "trained now: 0.weight" in reported


def schedule_free(named: Named) -> torch.optim.Optimizer:
    optimizer = AdamWScheduleFree([p for _, p in named], lr=0.05, warmup_steps=3)
    optimizer.train()
    return optimizer


@pytest.mark.parametrize(
    "build",
    [
        schedule_free,
        lambda named: Counting([p for _, p in named], lr=0.05),
        lambda named: Estimating([p for _, p in named], lr=0.5),
        lambda named: torch.optim.Adagrad([p for _, p in named], initial_accumulator_value=0.5),
    ],
    ids=["schedule-free", "Counting", "Estimating", "Adagrad"],
)
def test_what_an_optimizer_keeps_goes_on_bit_by_bit(build: Any, tmp_path: Path) -> None:
    straight = train(tmp_path / "a", steps=6, build=build)
    train(tmp_path / "b", steps=3, build=build)
    resumed = train(tmp_path / "b", steps=6, build=build, resume="auto")
    assert resumed.loss == straight.loss
    assert stored(straight).keys() == stored(resumed).keys()
    for name, tensor in stored(straight).items():
        assert torch.equal(tensor, stored(resumed)[name]), name


class Strange(torch.optim.SGD):
    """An optimizer that keeps an object for each parameter, or a value that belongs to no
    parameter.
    """

    everywhere = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["projector"] = object()
        if self.everywhere:
            self.state["shared"]["norm"] = 1.0  # type: ignore[index]


class Aside(torch.optim.SGD):
    """An optimizer that counts steps where torch's own `state_dict` does not look."""

    calls, _steps = 0, 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.calls, self._steps = self.calls + 1, self._steps + 1


def test_what_an_optimizer_counts_aside_is_reported(tmp_path: Path, caplog: Any) -> None:
    def build(pairs: Named) -> torch.optim.Optimizer:
        return Aside([p for _, p in pairs], lr=0.1)

    train(tmp_path, steps=3, build=build)
    (message,) = [r.getMessage() for r in caplog.records if "no checkpoint holds" in r.getMessage()]
    assert "the optimizer Aside counts in calls, attributes of its own" in message


class StrangeGroups(torch.optim.SGD):
    """An optimizer that keeps values in its groups that no checkpoint can hold, beside the recipe's
    own values.
    """

    def __init__(self, params: Any, kept: Any) -> None:
        super().__init__([{"params": params, "mode": "slow", "table": {"a": 1}}], lr=0.1)
        self.kept = kept

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.kept(self.param_groups[0])


KEPT: dict[str, Callable[[dict[str, Any]], Any]] = {
    "projector": lambda group: group.update(projector=object()),
    "mode": lambda group: group.update(mode="fast"),
    "table": lambda group: group["table"].update(a=group["table"]["a"] + 1),
}


@pytest.mark.parametrize("named", KEPT)
def test_what_cannot_be_saved_of_groups_is_refused_in_the_first_update(
    named: str, tmp_path: Path
) -> None:
    def build(kept: Any) -> Callable[[Named], torch.optim.Optimizer]:
        return lambda pairs: StrangeGroups([p for _, p in pairs], kept)

    with pytest.raises(RecipeError, match=f"StrangeGroups keeps {named},"):
        train(tmp_path / "a", steps=2, build=build(KEPT[named]))
    assert not list(tmp_path.glob("a/checkpoints/checkpoint-*"))
    train(tmp_path / "b", steps=2, build=build(lambda group: None))


@pytest.mark.parametrize(("everywhere", "named"), [(False, "projector"), (True, "shared")])
def test_what_cannot_be_saved_is_refused_in_the_first_update(
    everywhere: bool, named: str, tmp_path: Path
) -> None:
    def build(pairs: Named) -> torch.optim.Optimizer:
        optimizer = Strange([p for _, p in pairs], lr=0.1)
        optimizer.everywhere = everywhere
        return optimizer

    with pytest.raises(RecipeError, match=f"Strange keeps .*{named}"):
        train(tmp_path, steps=2, build=build)
    assert not list(tmp_path.glob("checkpoints/checkpoint-*"))
