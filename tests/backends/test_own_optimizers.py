"""Optimizers that a recipe derives from torch's, or writes itself, continue after a resume."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from few_cases import only_quick
from small_networks import SETTINGS, Blocks, copied
from test_attached import recipe
from torch import Tensor

from drivetrain.conformance.bench import Bench
from drivetrain.conformance.subject import Subject


class Derived(torch.optim.AdamW):
    """Torch's optimizer under another name."""


class Counts(torch.optim.Optimizer):
    """SGD whose rate falls with the number of its steps, which it keeps in an int or a tensor."""

    def __init__(self, parameters: Any, in_tensor: bool) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self.in_tensor = in_tensor

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros(()) if self.in_tensor else 0
            state["step"] += 1
            count = state["step"].item() if self.in_tensor else state["step"]
            parameter.sub_(parameter.grad, alpha=0.05 / count)


OPTIMIZERS: dict[str, Any] = {
    "derived": lambda named: Derived([each for _, each in named], lr=0.05),
    "int": lambda named: Counts([each for _, each in named], in_tensor=False),
    "tensor": lambda named: Counts([each for _, each in named], in_tensor=True),
}
SUBJECTS = {
    "cpu": Subject("cpu"),
    "ddp": Subject("ddp", 2),
    "fsdp": Subject("fsdp", 2),
    **{f"zero-{stage}": Subject("deepspeed", 2, {"stage": stage}) for stage in (1, 2, 3)},
}


def trained(bench: Bench, folder: str) -> dict[str, list[dict[str, Tensor]]]:
    """Train with each optimizer: to the end, and in two runs; return the weights of both ends."""
    ends: dict[str, list[dict[str, Tensor]]] = {}
    for name, optimizer in OPTIMIZERS.items():
        kept = dataclasses.replace(recipe(Blocks), optimizer=optimizer)
        saves = {**SETTINGS, "steps": 4, "checkpoint.every": 2, "checkpoint.at_end": False}
        whole = bench.fit(kept, saves, finish=copied)
        out = f"{folder}/{name}"
        bench.fit(kept, {**saves, "steps": 2}, out=out)
        ends[name] = [
            whole.finish,
            bench.fit(kept, saves, out=out, resume="auto", finish=copied).finish,
        ]
    return ends


@pytest.mark.parametrize("driver", only_quick(SUBJECTS, ("cpu",)))
def test_a_resumed_run_is_the_run_that_went_on(driver: str, tmp_path: Path) -> None:
    for ends in SUBJECTS[driver].run(trained, folder=str(tmp_path)):
        for name, (whole, resumed) in ends.items():
            for key, expected in whole.items():
                assert torch.equal(resumed[key], expected), (name, key)
