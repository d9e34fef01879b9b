"""Each task is trained as its first lines say, and reaches what they promise."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from drivetrain import Result, fit

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "tasks"


def figures(result: Result) -> Mapping[str, float]:
    return result.metrics["held_out"]


def draws_digits(result: Result) -> bool:
    """What it drew is about as near to some digit as digits are to each other."""
    digits = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1
    drawn, noise = result.finish, torch.randn(32, 64).clamp(-1, 1)
    near = torch.cdist(drawn, digits).min(1).values.mean()
    assert near < 0.6 * torch.cdist(noise, digits).min(1).values.mean()
    return figures(result)["loss"] < 0.5  # 1 knows nothing


REACHES: dict[str, Callable[[Result], bool]] = {
    "diffusion": draws_digits,
    "images": lambda result: figures(result)["accuracy"] > 0.95,
    "tables": lambda result: figures(result)["r2"] > 0.35,
    "texts": lambda result: (
        figures(result)["accuracy"] > 0.93 > figures(result)["always_code"] + 0.1
    ),
}


def test_each_task_is_trained() -> None:
    assert sorted(REACHES) == sorted(path.stem for path in FOLDER.glob("*.py"))


@pytest.mark.parametrize("name", REACHES)
def test_a_task(name: str) -> None:
    task = runpy.run_path(str(FOLDER / f"{name}.py"))

    def finish(model: nn.Module) -> Any:
        with torch.no_grad():
            return task["draw"](model, 32) if name == "diffusion" else None

    one = {"threads": 1}
    result = fit(
        task["recipe"](), task["settings"], backend="cpu", backend_options=one, finish=finish
    )
    assert REACHES[name](result), result


def test_what_diffusion_prints() -> None:
    task = runpy.run_path(str(FOLDER / "diffusion.py"))
    lines = task["sample"](task["Denoiser"]()).splitlines()
    assert [len(line) for line in lines] == [36] * 8
