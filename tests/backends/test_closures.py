"""Optimizers that evaluate the loss again are refused by name, and the suggested remedy works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain import OptimizerSettings, Recipe, ScheduleSettings, Settings
from drivetrain.kernel.errors import RecipeError
from drivetrain.trainer.fit import fit
from drivetrain.trainer.settings import DataSettings

PAGE = Path(__file__).parents[2] / "docs" / "optimizers.md"
X = torch.randn(16, 3, generator=torch.Generator().manual_seed(1))
SETTINGS = Settings(
    steps=4,
    global_batch=4,
    max_grad_norm=None,
    data=DataSettings(shuffle=False),
    schedule=ScheduleSettings(name="constant"),
    optimizer=OptimizerSettings(name="torch.optim.SGD", lr=0.1, weight_decay=0.0),
)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def loss(module: nn.Module, x: Tensor) -> Tensor:
    return (module(x) - x.sum(1, keepdim=True).sin()).square().sum()


class Sam(torch.optim.SGD):
    """SAM in its usual form: the closure of `step` is optional in its signature, but needed."""

    def first_step(self) -> None: ...

    def second_step(self) -> None: ...


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Sam])
def test_an_optimizer_that_wants_a_closure_is_refused_with_the_way_out(kind: Any) -> None:
    recipe = Recipe(
        model=model,
        loss=loss,
        train_data=list(X),
        optimizer=lambda named: kind([p for _, p in named], lr=0.1),
    )
    with pytest.raises(RecipeError, match=rf"optimizer {kind.__name__} .*Recipe\.step"):
        fit(recipe, SETTINGS, backend="cpu")


def test_the_step_that_the_page_shows_is_that_of_a_plain_loop() -> None:
    (code,) = re.findall(r"```python\n(def step.*?)```", PAGE.read_text(), flags=re.DOTALL)
    names: dict[str, Any] = {"torch": torch, "loss": loss}
    exec(code, names)
    recipe = Recipe(model=model, loss=loss, train_data=list(X), step=names["step"])
    trained = fit(recipe, SETTINGS, backend="cpu", finish=lambda module: module).finish
    plain = model()
    optimizer, weights = torch.optim.SGD(plain.parameters(), lr=0.1), list(plain.parameters())
    for x in X.split(4):
        before = [weight.detach().clone() for weight in weights]
        gradients = torch.autograd.grad(loss(plain, x), weights)
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight += 0.05 * gradient / norm
        optimizer.zero_grad()
        (loss(plain, x) / 4).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for weight, old in zip(weights, before, strict=True):
                weight.copy_(old)
        optimizer.step()
    for ours, theirs in zip(trained.parameters(), weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
