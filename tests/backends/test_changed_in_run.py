"""An observer that changes the model or its optimizer during a run: drivers train with the change,
or refuse it by name before the next update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from environments import python_of_all
from few_cases import only_quick
from small_networks import TwoLayers, copied
from torch import nn
from torch.nn.utils import prune

from drivetrain.conformance.bench import Bench
from drivetrain.conformance.subject import Subject
from drivetrain.kernel.errors import DrivetrainError
from drivetrain.kernel.events import StepEnded
from drivetrain.kernel.recipe import Recipe

SETTINGS = {
    "steps": 6,
    "global_batch": 8,
    "data.shuffle": False,
    "schedule.name": "cosine",
    "log_every": 6,
}


class Changes:
    """A recipe's model and optimizer, and the observer that changes them after step 3."""

    def __init__(self, kind: str) -> None:
        self.kind, self.steps = kind, 0

    def model(self) -> nn.Module:
        self.module = TwoLayers()
        return self.module

    def build(self, named: Any) -> torch.optim.Optimizer:
        first = [p for name, p in named if self.kind != "group" or name.startswith("first")]
        self.optimizer = torch.optim.AdamW(first, lr=0.05)
        return self.optimizer

    def __call__(self, event: object) -> None:
        if isinstance(event, StepEnded):
            self.steps = event.step
            if event.step == 3:
                getattr(self, self.kind)()

    def prune(self) -> None:
        prune.l1_unstructured(self.module.first, "weight", 0.5)  # type: ignore[no-untyped-call]

    def rename(self) -> None:
        """Register the weight under another name, as pruning does. Pruning itself does not work
        on sharded weights: torch refuses it.
        """
        first = self.module.first
        weight = first._parameters.pop("weight")
        first.register_parameter("weight_orig", weight)
        first.weight = weight.detach()

    def replace(self) -> None:
        self.module.first.weight = nn.Parameter(torch.zeros(4, 4))

    def layer(self) -> None:
        self.module.last = nn.Linear(4, 2)

    def add(self) -> None:
        self.module.more = nn.Linear(2, 2)

    def group(self) -> None:
        last = list(self.module.last.parameters())
        self.optimizer.add_param_group({"params": last, "lr": 0.02})

    def same(self) -> None:
        """Assign a weight and a layer to themselves, as code that ties weights does."""
        self.module.first.weight = self.module.first.weight
        self.module.last = self.module.last


def changed(bench: Bench, *, kinds: Sequence[str]) -> dict[str, Any]:
    """A job: return, for each kind of change, the trained weights, or the last step and the
    message of the refusal.
    """
    reported: dict[str, Any] = {}
    data = list(torch.randn(48, 4, generator=torch.Generator().manual_seed(0)))
    for kind in kinds:
        run = Changes(kind)
        recipe = Recipe(
            run.model,
            lambda module, x: (module(x) - x[:, :2]).square().sum(),
            data,
            optimizer=run.build,
        )
        try:
            reported[kind] = bench.fit(recipe, SETTINGS, observers=[run], finish=copied).finish
        except DrivetrainError as error:
            reported[kind] = f"after step {run.steps} {error}"
    return reported


PLACES = "after step 3 the model has other parameters in the places of"
HELD = "these parameters were registered in the model during the run, and"
REPLACED = {
    "replace": f"{PLACES} first.weight than",
    "layer": f"{PLACES} last.weight, last.bias than",
}
CONVERTED = {
    "rename": f"after step 3 first.weight_orig: {HELD}",
    "replace": f"after step 3 first.weight: {HELD}",
    "layer": f"after step 3 last.weight, last.bias: {HELD}",
    "add": f"after step 3 more.weight, more.bias: {HELD}",
}
ADDED = "after step 3 more.weight, more.bias: these parameters were added to the model"
GROUP = "after step 3 driver 'deepspeed' refuses optimizer.add_param_group during a run"
REFUSED: dict[str, dict[str, str]] = {
    "cpu": REPLACED,
    "ddp": {**REPLACED, "add": ADDED},
    "fsdp": CONVERTED,
    "mesh": CONVERTED,
    "zero-1": {**CONVERTED, "group": GROUP},
    "zero-3": {**CONVERTED, "group": GROUP},
    "xla": CONVERTED,
    "ipex": CONVERTED,
}
SUBJECTS = {
    "cpu": Subject("cpu"),
    "ddp": Subject("ddp", 2),
    "fsdp": Subject("fsdp", 2),
    "mesh": Subject("mesh", 2),
    "zero-1": Subject("deepspeed", 2, {"stage": 1}),
    "zero-3": Subject("deepspeed", 2, {"stage": 3}),
    "xla": Subject("xla", options={"devices": 1}, python=python_of_all()),
    "ipex": Subject("ipex", python=python_of_all()),
}
RIGHT = ("group", "same", "prune")


@pytest.mark.parametrize("driver", only_quick(SUBJECTS, ("cpu", "ddp")))
def test_changes_are_followed_or_refused_before_the_next_update(
    driver: str, request: pytest.FixtureRequest
) -> None:
    if SUBJECTS[driver].python:
        request.getfixturevalue("environment_of_all")
    (alone,) = SUBJECTS["cpu"].run(changed, kinds=RIGHT)
    refused = REFUSED[driver]
    right = [kind for kind in RIGHT if kind not in refused]
    if "rename" in refused:
        right.remove("prune")
    for reported in SUBJECTS[driver].run(changed, kinds=[*refused, *right]):
        for kind, message in refused.items():
            assert reported[kind].startswith(message), reported[kind]
        for kind in right:
            assert reported[kind].keys() == alone[kind].keys()
            for name, expected in alone[kind].items():
                assert torch.allclose(reported[kind][name], expected, atol=1e-6), (kind, name)
