"""Statistics by parameter and by module: what is measured, when, and that it changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain import Recipe, Settings
from drivetrain.kernel.contract import World
from drivetrain.kernel.errors import CapabilityRefused, SettingError
from drivetrain.kernel.events import Logged
from drivetrain.trainer.activations import Activations
from drivetrain.trainer.fit import fit
from drivetrain.trainer.setting_values import override
from drivetrain.trainer.statistics import Statistics, Stats

DATA = [torch.tensor([1.0, -2.0, 0.0]), torch.tensor([3.0, 0.5, 0.0])]


class Net(nn.Module):
    """Weights (1, 3), of which one element never has a gradient, and a frozen scale."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 1, bias=False)
        self.relu = nn.ReLU()
        self.scale = nn.Parameter(torch.full((2,), 2.0), requires_grad=False)
        with torch.no_grad():
            self.line.weight.copy_(torch.tensor([[0.5, 0.0, 1.0]]))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.relu(self.line(x)) * self.scale[0]
        return found


def total(module: nn.Module, batch: Tensor) -> Tensor:
    found: Tensor = module(batch).sum()
    return found


def run(
    settings: Mapping[str, Any],
    data: Any = DATA,
    model: Callable[[], nn.Module] = Net,
    **changes: Any,
) -> tuple[list[Stats], list[Logged], nn.Module]:
    """Train, and return the statistics, the logs and the trained model."""
    seen: list[Any] = []
    kept: list[nn.Module] = []
    plan = {
        "steps": 1, "global_batch": 2, "log_every": 1, "stats.every": 1, "data.shuffle": False,
        "optimizer.name": "torch.optim.SGD", "optimizer.lr": 0.1, "schedule.name": "constant",
        "max_grad_norm": None, **settings,
    }  # fmt: skip

    def build() -> nn.Module:
        kept.append(model())
        return kept[-1]

    recipe = Recipe(model=build, loss=total, train_data=data, **changes)
    fit(recipe, override(Settings(), plan), backend="cpu", observers=[seen.append])
    of_kind = ([event for event in seen if isinstance(event, kind)] for kind in (Stats, Logged))
    return (*of_kind, kept[-1])  # type: ignore[return-value]


def test_the_figures_are_those_computed_by_hand() -> None:
    # outputs: relu(0.5) * 2 and relu(1.5) * 2; the loss is the mean over two samples
    gradient = torch.tensor([1.0 + 3.0, -2.0 + 0.5, 0.0])
    (stats,), (logged,), _ = run({"stats.activations": ("line",), "max_grad_norm": 1.0})
    weight = stats.parameters["line.weight"]
    norm, weight_norm = float(gradient.norm()), math.sqrt(0.25 + 1)
    assert weight["grad_norm"] == pytest.approx(norm) == pytest.approx(logged.grad_norm)
    assert weight["weight_norm"] == pytest.approx(weight_norm)
    assert weight["update_norm"] == pytest.approx(0.1, rel=1e-5)  # clipped to a norm of 1
    assert weight["update_ratio"] == pytest.approx(0.1 / weight_norm, rel=1e-5)
    assert weight["grad_zeros"] == weight["weight_zeros"] == pytest.approx(1 / 3)
    assert weight["grad_nonfinite"] == weight["weight_nonfinite"] == 0
    assert stats.parameters["scale"] == {
        "grad_norm": None, "weight_norm": pytest.approx(math.sqrt(8)), "update_norm": 0.0,
        "update_ratio": 0.0, "grad_zeros": None, "weight_zeros": 0.0, "grad_nonfinite": None,
        "weight_nonfinite": 0.0,
    }  # fmt: skip
    assert stats.activations == {
        "line": {
            "mean": 1.0, "std": 0.5, "max_abs": 1.5, "zeros": 0.0, "nonfinite": 0.0
        }
    }  # fmt: skip


def test_what_is_not_finite_is_counted_and_named() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))

    data = [torch.ones(3) for _ in range(4)]
    data[2] = torch.tensor([1.0, math.inf, 0.0])
    (_, stats), _, _ = run({"steps": 2, "stats.activations": ("0",)}, data, build)
    assert stats.parameters["0.weight"]["grad_nonfinite"] == 6
    assert not math.isfinite(stats.parameters["0.weight"]["grad_norm"] or 0.0)
    assert {figures["update_norm"] for figures in stats.parameters.values()} == {0.0}
    assert stats.activations["0"]["nonfinite"] == 0.5
    assert math.isfinite(stats.activations["0"]["mean"] or math.nan)


def test_steps_are_due_by_logs() -> None:
    stats, _, _ = run({"steps": 14, "log_every": 3, "stats.every": 2, "epochs": 99})
    assert [each.step for each in stats] == [6, 12]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_training_stays_the_same_bit_for_bit(precision: str) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 1))

    settings = {"steps": 6, "precision": precision, "optimizer.name": "torch.optim.AdamW"}
    data = [torch.randn(3, generator=torch.Generator().manual_seed(n)) for n in range(12)]
    without = run({**settings, "stats.every": 0}, data, build)
    stats, logs, model = run({**settings, "stats.activations": ("*",)}, data, build)
    assert [log.loss for log in logs] == [log.loss for log in without[1]]
    assert str(model.state_dict()) == str(without[2].state_dict())
    assert not without[0] and len(stats) == 6
    for found, log in zip(stats, logs, strict=True):
        squares = sum((each["grad_norm"] or 0.0) ** 2 for each in found.parameters.values())
        assert math.sqrt(squares) == pytest.approx(log.grad_norm, rel=1e-5)


def test_forwards_of_evaluations_are_left_out() -> None:
    settings = {"steps": 4, "evaluate.every": 1, "stats.activations": ("line",)}
    seen = [run(settings, eval_data=data)[0] for data in ({}, {"other": [torch.ones(3) * 50]})]
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"stats.activations": ("line", "lime*")}, "'lime\\*', which matches no module"),
        ({"stats.activations": ("line",), "stats.every": 0}, "stats.every=0 measures nothing"),
    ],
)
def test_settings_that_measure_nothing_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        run(settings)


def test_activations_of_compiled_layers_are_refused() -> None:
    settings: Any = override(Settings(), {"stats.activations": ("line",), "compile": True})
    with pytest.raises(SettingError, match="compiled layers show no activations"):
        Activations(settings, World(0, 1, torch.device("cpu"), feeder_index=0, num_feeders=1))


def test_a_driver_that_shows_no_gradients_is_refused() -> None:
    settings: Any = override(Settings(), {"stats.every": 2})
    with pytest.raises(CapabilityRefused, match=r"'odd' refuses stats.every=2: it does"):
        Statistics.of(settings, object(), object(), "odd")  # type: ignore[arg-type]
