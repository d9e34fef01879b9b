"""The ipex driver keeps the laws, and has tests of its own peculiarities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from environments import python_of_all
from few_cases import only_quick
from quick_cases import is_quick
from small_networks import SETTINGS, copied
from torch import nn

from drivetrain.backends.ipex import driver
from drivetrain.conformance import Case, cases
from drivetrain.conformance.bench import Bench
from drivetrain.conformance.subject import Subject
from drivetrain.kernel.errors import CapabilityRefused
from drivetrain.kernel.plan import Plan
from drivetrain.kernel.recipe import Recipe


@pytest.mark.usefixtures("environment_of_all")
@pytest.mark.parametrize(
    "case",
    only_quick(cases("ipex", peers=["cpu", "ddp:2"], python=python_of_all()), is_quick),
    ids=str,
)
def test_laws(case: Case) -> None:
    case.check()


def test_the_probe_names_what_to_use_instead() -> None:
    reason = driver.probe().reason
    for word in ("upstream ended", "backend cpu", "backend xpu"):
        assert word in reason


def test_other_than_trained_precisions_are_not_declared() -> None:
    assert driver.capabilities(Plan()).precisions == {"fp32", "bf16"}


def convolutions() -> nn.Module:
    """Layers whose weights the extension keeps in blocks on each processor, one of them twice."""
    first = nn.Conv2d(3, 3, 3, padding=1)
    return nn.Sequential(first, nn.Tanh(), first, nn.Conv2d(3, 3, 1))


def transposed() -> nn.Module:
    """A layer whose weights the extension cannot load once they are kept in blocks."""
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.ConvTranspose2d(4, 3, 3))


MODELS = {"convolutions": convolutions, "transposed": transposed}


def trained(bench: Bench, *, model: str, out: str, resume: str | None = None) -> dict[str, Any]:
    """A job: return the trained weights and the folder of the checkpoint of the second step."""
    images = list(torch.randn(24, 3, 6, 6, generator=torch.Generator().manual_seed(0)))
    recipe = Recipe(
        MODELS[model],
        lambda module, x: (module(x) - x).square().mean((1, 2, 3)).sum(),
        images,
        # the extension blocks weights for the optimizers that it has fused steps of
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], 0.001, momentum=0.9),
    )
    saves = {**SETTINGS, "checkpoint.every": 2}
    result = bench.fit(recipe, saves, out=out, resume=resume, finish=copied)
    second = str(result.checkpoint).replace("000003", "000002")
    return {"weights": result.finish, "second": second}


def refused(bench: Bench) -> str:
    """A job: return the message of the refusal to keep transposed convolutions in blocks."""
    recipe = Recipe(transposed, lambda module, x: module(x).sum(), [torch.zeros(3, 6, 6)])
    with pytest.raises(CapabilityRefused) as caught:
        bench.fit(recipe, SETTINGS)
    return str(caught.value)


@pytest.mark.usefixtures("environment_of_all")
def test_blocked_transposed_convolutions_are_refused() -> None:
    options = {"weights_prepack": True}
    (message,) = Subject("ipex", options=options, python=python_of_all()).run(refused)
    assert message.startswith("driver 'ipex' refuses backend.weights_prepack=true")
    assert "transposed convolutions" in message


@pytest.mark.few(1)
@pytest.mark.usefixtures("environment_of_all")
@pytest.mark.parametrize("model", MODELS)
def test_convolutions_are_saved_and_resumed(model: str, tmp_path: Path) -> None:
    """They have the weights of one process after training, and after a resume there and back."""
    alone, subject = Subject("cpu"), Subject("ipex", python=python_of_all())
    (expected,) = alone.run(trained, model=model, out=str(tmp_path / "alone"))
    (here,) = subject.run(trained, model=model, out=str(tmp_path / "here"))
    assert Path(here["second"]).name.endswith("000002")
    there, back = (
        world.run(trained, model=model, out=str(tmp_path / name), resume=run["second"])[0]
        for name, world, run in (("there", subject, expected), ("back", alone, here))
    )
    for run in (here, there, back):
        assert run["weights"].keys() >= expected["weights"].keys()
        for name, weight in expected["weights"].items():
            torch.testing.assert_close(run["weights"][name], weight, rtol=0, atol=1e-5)
