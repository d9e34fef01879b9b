"""Each task is trained as its first lines say, and reaches the promised results."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from few_cases import only_quick
from sklearn.datasets import load_digits
from torch import nn

from drivetrain import Result, fit

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "tasks"


def figures(result: Result) -> Mapping[str, float]:
    return result.metrics["held_out"]


def draws_digits(result: Result) -> bool:
    """Return whether drawings are about as near to some digit as digits are to each other."""
    digits = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1
    drawn, noise = result.finish, torch.randn(32, 64).clamp(-1, 1)
    near = torch.cdist(drawn, digits).min(1).values.mean()
    assert near < 0.6 * torch.cdist(noise, digits).min(1).values.mean()
    return figures(result)["loss"] < 0.5  # 1 knows nothing


def passes_for_digits(result: Result) -> bool:
    """Return whether drawings are near to digits, and to several different ones."""
    real = load_digits()
    digits = torch.tensor(real.data, dtype=torch.float32) / 8 - 1
    far = torch.cdist(result.finish, digits)
    noise = torch.cdist(torch.randn(32, 64).clamp(-1, 1), digits).min(1).values.mean()
    assert far.min(1).values.mean() < 0.6 * noise
    return len(set(real.target[far.argmin(1)])) >= 5


REACHES: dict[str, Callable[[Result], bool]] = {
    "diffusion": draws_digits,
    "gan": passes_for_digits,
    "images": lambda result: figures(result)["accuracy"] > 0.95,
    "pole": lambda result: figures(result)["balanced"] > 0.9,
    "tables": lambda result: figures(result)["r2"] > 0.35,
    "texts": lambda result: (
        figures(result)["accuracy"] > 0.93 > figures(result)["always_code"] + 0.1
    ),
}


def test_each_task_is_trained() -> None:
    assert sorted(REACHES) == sorted(path.stem for path in FOLDER.glob("*.py"))


@pytest.mark.parametrize("name", only_quick(REACHES, ("tables", "texts")))
def test_a_task(name: str) -> None:
    task = runpy.run_path(str(FOLDER / f"{name}.py"))

    def finish(model: nn.Module) -> Any:
        with torch.no_grad():
            return task["draw"](model, 32) if "draw" in task else None

    result = fit(task["recipe"](), task["settings"], backend="cpu", finish=finish)
    assert REACHES[name](result), result


def test_a_pole_falls_where_pushes_are_by_chance() -> None:
    task = runpy.run_path(str(FOLDER / "pole.py"))
    starts = task["recipe"]().eval_data["held_out"]
    models = {"actor": lambda states: torch.zeros(len(states), 2)}
    _, _, standing = task["tried"](models, starts, task["by_chance"])
    assert 0.15 < standing[1:].float().mean() < 0.25


@pytest.mark.parametrize(("name", "model"), [("diffusion", "Denoiser"), ("gan", "models")])
def test_what_is_drawn_is_printed(name: str, model: str) -> None:
    task = runpy.run_path(str(FOLDER / f"{name}.py"))
    lines = task["sample"](task[model]()).splitlines()
    assert [len(line) for line in lines] == [36] * 8
