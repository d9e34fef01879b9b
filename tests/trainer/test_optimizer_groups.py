"""Optimizers for groups of parameters in the settings, and a recipe's own schedule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from drivetrain import OptimizerGroup, OptimizerSettings, Recipe, Settings
from drivetrain.checkpoint import CheckpointReader
from drivetrain.cli.settings.explain import state_bytes
from drivetrain.cli.settings.schema import schema
from drivetrain.conformance.problems import PROBLEMS, Samples
from drivetrain.kernel.errors import CheckpointMismatch, RecipeError, SettingError
from drivetrain.kernel.events import Logged, Resumed, RunStarted
from drivetrain.trainer.fit import fit
from drivetrain.trainer.optimizers import CombinedOptimizer
from drivetrain.trainer.setting_values import flatten, override

MUON = {"dims": 2, "name": "torch.optim.Muon", "lr": 0.02, "args": {"momentum": 0.9}}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(5, 4), nn.LayerNorm(4)
        self.head = nn.Linear(4, 2)
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.norm(self.embedding(x)))
        return y


def loss(module: nn.Module, batch: Any) -> Tensor:
    result: Tensor = module(batch[0]).square().sum()
    return result


def recipe(**parts: Any) -> Recipe:
    data = torch.utils.data.TensorDataset(torch.arange(16) % 5)
    return Recipe(model=Model, loss=loss, train_data=data, **parts)


def settings(groups: Any, **given: Any) -> Settings:
    values = {key.replace("__", "."): value for key, value in given.items()}
    plain = {"steps": 4, "global_batch": 4, "log_every": 1, "optimizer.groups": groups}
    return override(Settings(), {**plain, **values})


def built(groups: Any, **given: Any) -> tuple[torch.optim.Optimizer, dict[str, dict[str, Any]]]:
    """Return the optimizer, and the group of each parameter."""
    named = dict(Model().named_parameters())
    optimizer = settings(groups, **given).optimizer.build(named.items())
    of = {p: group for group in optimizer.param_groups for p in group["params"]}
    return optimizer, {name: of[p] for name, p in named.items() if p in of}


def test_patterns_come_before_dimensions_and_these_before_the_rest() -> None:
    optimizer, of = built([{"pattern": "emb*", "lr": 0.5}, MUON, {"weight_decay": 0.1}])
    assert isinstance(optimizer, CombinedOptimizer)
    reported = {name: (g["optimizer"], g["lr"], g["weight_decay"]) for name, g in of.items()}
    adamw, muon = "torch.optim.AdamW", "torch.optim.Muon"
    assert reported == {
        "embedding.weight": (adamw, 0.5, 0.0),
        "norm.weight": (adamw, 1e-3, 0.1),  # asked for, so vectors decay too
        "norm.bias": (adamw, 1e-3, 0.1),
        "head.weight": (muon, 0.02, 0.0),
        "head.bias": (adamw, 1e-3, 0.1),
    }


def test_groups_of_one_kind_are_one_optimizer() -> None:
    groups = [{"pattern": "head.*", "lr": 0.5, "args": {"eps": 1e-3}}, {}]
    optimizer, of = built(groups, optimizer__weight_decay=0.2, optimizer__args={"amsgrad": True})
    assert type(optimizer) is torch.optim.AdamW
    reported = {n: (g["lr"], g["weight_decay"], g["eps"], g["amsgrad"]) for n, g in of.items()}
    assert reported["head.weight"] == (0.5, 0.2, 1e-3, True)
    assert reported["head.bias"] == (0.5, 0.0, 1e-3, True)
    assert reported["embedding.weight"] == (1e-3, 0.2, 1e-8, True)


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([{"pattern": "nose.*"}, {}], r"groups 0 \('nose\.\*'\) takes no parameter.*norm\.weight"),
        ([{"pattern": "*.weight"}], r"no group .* takes norm\.bias \(4,\), head\.bias \(2,\); add"),
        ([{"pattern": "n*"}, {"pattern": "*s"}, {}], r"0 \('n\*'\) and 1 \('\*s'\) both take norm"),
        ([{}, {}], "0 .the rest. and 1 .the rest. both take embedding.weight"),
        ([{"patern": "a"}], r"groups\.0\.patern; did you mean optimizer\.groups\.0\.pattern"),
        ([{"name": "torch.optim.Muon"}], r"Muon' refuses .* for embedding\.weight \(5, 4\), norm"),
        ([{"name": "torch.optim.Moon"}], r"torch\.optim\.Moon.* with torch \d"),
        ([{"lr": -1}], r"groups\.0\.lr is -1\.0; it must be at least 0"),
        ([{"args": {"betaz": 1}}], r"AdamW' refuses .*betaz"),
        ("pattern", r"optimizer\.groups is 'pattern'"),
        ([3], r"groups\.0 is 3; it must be a table of pattern, dims"),
    ],
)
def test_groups_that_cannot_be_are_refused_before_anything_starts(
    groups: Any, words: str, tmp_path: Path
) -> None:
    reported: list[object] = []
    with pytest.raises(SettingError, match=words):
        fit(
            recipe(),
            settings(json.dumps(groups) if groups != "pattern" else groups),
            backend="cpu",
            out=tmp_path / "run",
            observers=[reported.append],
        )
    assert not reported
    assert not (tmp_path / "run").exists()


def test_what_is_said_twice_is_refused() -> None:
    own = recipe(optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1))
    with pytest.raises(SettingError, match="the recipe builds its own"):
        fit(own, settings([{}]), backend="cpu")
    with pytest.raises(SettingError, match="has a schedule of its own"):
        fit(recipe(schedule=lambda n: 1.0), settings([], schedule__name="linear"), backend="cpu")


def test_groups_are_kept_with_the_run_and_in_the_schema(tmp_path: Path) -> None:
    groups = [{"pattern": "emb*", "lr": 0.5}, {**MUON, "pattern": "head.weight"}, {}]
    result = fit(recipe(), settings(groups), backend="cpu", out=tmp_path)
    assert result.checkpoint is not None
    manifest = CheckpointReader(result.checkpoint).manifest
    assert manifest.settings["optimizer.groups"] == groups
    assert manifest.state["optimizer"]["name"] == "AdamW and Muon"
    again = override(Settings(), flatten(settings(groups)))
    assert again.optimizer.groups[0] == OptimizerGroup(pattern="emb*", lr=0.5)
    jsonschema.validate({"optimizer": {"groups": groups}}, schema())
    with pytest.raises(jsonschema.ValidationError, match="patern"):
        jsonschema.validate({"optimizer": {"groups": [{"patern": "a"}]}}, schema())


def test_a_parameter_that_changed_its_optimizer_is_refused(tmp_path: Path) -> None:
    sgd = {"name": "torch.optim.SGD", "args": {"momentum": 0.9}}
    fit(recipe(), settings([{"pattern": "head.*", **sgd}, {}]), backend="cpu", out=tmp_path)
    with pytest.raises(CheckpointMismatch, match=r"exp_avg.* and this SGD keeps momentum_buffer"):
        fit(
            recipe(),
            settings([{"pattern": "norm.*", **sgd}, {}], steps=5),
            backend="cpu",
            out=tmp_path,
            resume="auto",
        )


def test_memory_of_each_group_is_estimated() -> None:
    sgd = {"pattern": "head.*", "name": "torch.optim.SGD"}
    optimizer = settings([sgd, {}]).optimizer
    found = state_bytes(recipe(), optimizer, Model())
    assert found["head.weight"] == found["head.bias"] == 0
    assert found["norm.weight"] == 2 * 4 * 4 + 4


def rates(given: Recipe, out: Path, steps: int, resume: Any = None, **more: Any) -> list[float]:
    reported: list[float] = []

    def observe(event: object) -> None:
        if isinstance(event, Logged):
            reported.append(event.learning_rate)

    chosen = settings(more.pop("groups", []), steps=steps, optimizer__lr=0.5, **more)
    fit(given, chosen, backend="cpu", out=out, resume=resume, observers=[observe])
    return reported


def test_a_schedule_may_be_a_function(tmp_path: Path) -> None:
    given = recipe(schedule=lambda applied: 1.0 / (1 + applied))
    assert rates(given, tmp_path, 3) == [0.5, 0.25, 0.5 / 3]
    assert rates(given, tmp_path, 5, resume="auto") == [0.125, 0.1]


def sequence(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    parts = [
        lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
        lr_scheduler.ExponentialLR(optimizer, 0.5),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])


def test_a_schedule_may_be_one_of_torchs(tmp_path: Path) -> None:
    by_hand = torch.optim.SGD([torch.zeros(())], lr=0.5)
    scheduler, expected = sequence(by_hand), []
    for _ in range(7):
        expected.append(by_hand.param_groups[0]["lr"])
        by_hand.step()
        scheduler.step()
    given = recipe(schedule=sequence)
    assert rates(given, tmp_path, 4) == expected[:4]
    assert rates(given, tmp_path, 7, resume="auto") == expected[4:]


def test_a_scheduler_of_torchs_knows_the_groups(tmp_path: Path) -> None:
    def of_groups(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        return lr_scheduler.LambdaLR(optimizer, [lambda n: 1.0, lambda n: 0.5**n])

    seen: list[list[float]] = []

    def observe(event: object) -> None:
        seen.append([group["lr"] for group in made[-1].param_groups])

    made: list[torch.optim.Optimizer] = []
    build = OptimizerSettings.build

    def kept(self: Any, *arguments: Any, **more: Any) -> torch.optim.Optimizer:
        made.append(build(self, *arguments, **more))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OptimizerSettings, "build", kept)
        fit(
            recipe(schedule=of_groups),
            settings([{"pattern": "head.*", "lr": 0.25}, {}], optimizer__lr=0.5, steps=3),
            backend="cpu",
            observers=[lambda event: observe(event) if isinstance(event, Logged) else None],
        )
    assert seen == [[0.25, 0.5], [0.25, 0.25], [0.25, 0.125]]


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (lambda applied: "fast", r"returned 'fast'"),
        (lambda applied: -1.0, r"returned -1\.0"),
        (lambda applied: 1.0 if applied < 2 else float("nan"), r"schedule\(2\) is nan"),
        (lr_scheduler.ReduceLROnPlateau, "set schedule.name=plateau"),
        (lambda o: lr_scheduler.OneCycleLR(o, 1.0, 9), r"cycle_momentum=False"),
        (3, "recipe.schedule is of type int"),
        (sequence(torch.optim.SGD([torch.zeros(())])), "SequentialLR, already built"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(schedule: Any, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        fit(recipe(schedule=schedule), settings([]), backend="cpu")


def test_a_resume_reports_other_groups(tmp_path: Path) -> None:
    fit(recipe(), settings([]), backend="cpu", out=tmp_path)
    notes: list[str] = []

    def observe(event: object) -> None:
        if isinstance(event, Resumed):
            notes.extend(event.notes)

    fit(
        recipe(),
        settings([{"pattern": "head.*", "lr": 0.5}, {}], steps=5),
        backend="cpu",
        out=tmp_path,
        resume="auto",
        observers=[observe],
    )
    assert any(note.startswith("optimizer.groups was [], is [{") for note in notes)
    assert "the optimizer had 1 groups, has 2" in notes


def test_a_model_that_cannot_be_built_without_memory_is_checked_when_it_is_built() -> None:
    def looks() -> nn.Module:
        module = PROBLEMS["regression"].model()
        assert float(next(module.parameters()).sum()) != 12.5
        return module

    given = PROBLEMS["regression"].recipe(model=looks, train_data=Samples("regression", 8))
    started: list[object] = []
    with pytest.raises(SettingError, match="takes no parameter"):
        fit(given, settings([{"pattern": "x"}, {}]), backend="cpu", observers=[started.append])
    assert not [event for event in started if isinstance(event, RunStarted)]


def test_rates_decay_from_the_last_layer_to_the_first() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(3, 2)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(3))
            self.head = nn.Linear(2, 1)

    model = Deep()
    names = {parameter: name for name, parameter in model.named_parameters()}
    settings = OptimizerSettings(lr=0.1, weight_decay=0.5, layer_decay=0.5)
    optimizer = settings.build(model.named_parameters())
    found = {
        names[p]: (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for p in group["params"]
    }
    assert found == {
        "embedding.weight": (0.1 / 16, 0.5),
        **{f"blocks.{n}.0.weight": (0.1 / 2 ** (3 - n), 0.5) for n in range(3)},
        **{f"blocks.{n}.0.bias": (0.1 / 2 ** (3 - n), 0.0) for n in range(3)},
        "head.weight": (0.1, 0.5),
        "head.bias": (0.1, 0.0),
    }
    assert optimizer.param_groups[0]["lr"] == 0.1  # that is logged
    with pytest.raises(SettingError, match="no parameter is in a numbered block"):
        settings.build(nn.Linear(2, 2).named_parameters())
    with pytest.raises(SettingError, match=r"optimizer\.groups are set; take one"):
        OptimizerSettings(layer_decay=0.5, groups=(OptimizerGroup(),)).check()
