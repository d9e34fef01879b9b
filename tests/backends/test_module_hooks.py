"""Hooks on modules that are not linear layers: each driver trains as one process does, and passes
the same gradients to the hooks, or refuses a hook by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from small_networks import SETTINGS, Transformer, copied
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from drivetrain import Parallel, Recipe
from drivetrain.conformance.bench import Bench
from drivetrain.conformance.subject import Subject
from drivetrain.kernel.errors import RecipeError

COLUMNS_AND_ROWS: dict[str, Any] = {
    "blocks.*.attention.qkv": "column",
    "blocks.*.attention.out": "row",
    "blocks.*.up": "column",
    "blocks.*.down": "row",
    "blocks.*.norm": "sequence",
    "norm": "sequence",
    "rows": "vocabulary",
    "head": "vocabulary",
}
PARALLEL = Parallel(
    tensor=COLUMNS_AND_ROWS,
    fused={"blocks.*.attention.qkv": 3},
    sequence={"x": 1, "y": 1},
)
CHANGES = {
    "scale": lambda part, given, out: out * 1.5,
    "clamp": lambda part, given, out: out.clamp(-0.5, 0.5),
    "mean": lambda part, given, out: out - out.mean(1, keepdim=True),
}


def hooked(kind: str, where: str, seen: list[float]) -> Transformer:
    """Return a model with a hook on its module `where`. A `backward` hook halves the gradient of
    the input, and appends the size of the output's gradient to `seen`.
    """
    model = Transformer()
    part = model.get_submodule(where)

    def halve(module: nn.Module, given: Any, made: Any) -> Any:
        if model.training:
            seen.append(sum(float(grad.abs().sum()) for grad in made if grad is not None))
        return tuple(None if grad is None else grad * 0.5 for grad in given)

    if kind == "backward":
        part.register_full_backward_hook(halve)
    else:
        part.register_forward_hook(CHANGES[kind])
    return model


def loss(module: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(module(batch["x"]).flatten(0, 1), batch["y"].flatten(), reduction="sum")


def trained(bench: Bench, *, hooks: Sequence[Sequence[str]]) -> dict[str, Any]:
    """A job: return, for each hook, the trained weights and the gradients' sizes that the hook saw,
    or the message of the refusal.
    """
    rows = torch.randint(8, (24, 6), generator=torch.Generator().manual_seed(0))
    reported: dict[str, Any] = {}
    for kind, where in hooks:
        seen: list[float] = []
        recipe = Recipe(
            lambda kind=kind, where=where, seen=seen: hooked(kind, where, seen),
            loss,
            [{"x": row, "y": row.roll(1)} for row in rows],
            parallel=PARALLEL,
            optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.05),
        )
        try:
            weights = bench.fit(recipe, {**SETTINGS, "steps": 2}, finish=copied).finish
        except RecipeError as error:
            reported[f"{kind} {where}"] = str(error)
        else:
            reported[f"{kind} {where}"] = weights, seen
    return reported


SUBJECTS = {
    "fsdp": Subject("fsdp", 2),
    "zero-3": Subject("deepspeed", 2, {"stage": 3}),
    "tensor": Subject("mesh", 2, {"tensor": 2}),
    "context": Subject("mesh", 2, {"context": 2}),
    "pipeline": Subject("mesh", 2, {"pipeline": 2}),
}
QUICK = ("tensor",)
RIGHT = [
    *(("backward", name) for name in ("norm", "rows", "blocks.1.attention")),
    *(("scale", name) for name in ("rows", "blocks.1.attention")),
    *(("clamp", name) for name in ("blocks.0.norm", "blocks.1.down")),
]
OF_ALL_POSITIONS = [("mean", "blocks.0.norm"), ("mean", "rows")]


@pytest.mark.parametrize(
    "driver", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in SUBJECTS]
)
def test_hooks_of_modules_act_as_in_one_process_or_are_refused(driver: str) -> None:
    hooks = [*RIGHT, *OF_ALL_POSITIONS]
    (alone,) = Subject("cpu").run(trained, hooks=hooks)
    ranks = SUBJECTS[driver].run(trained, hooks=hooks)
    for reported in ranks:
        for name, (weights, _) in alone.items():
            if name.startswith("mean") and driver in ("tensor", "context"):
                in_rows = driver == "tensor" and name == "mean rows"
                why = "failed in 'rows'" if in_rows else f"with backend.{driver}=2 the loss of a"
                assert why in reported[name]
                continue
            assert not isinstance(reported[name], str), reported[name]
            for key, expected in weights.items():
                assert torch.allclose(reported[name][0][key], expected, atol=1e-6), (name, key)
    if driver in ("fsdp", "zero-3"):  # each rank's loss counts twice, and the mean is taken
        for name in (f"backward {where}" for kind, where in RIGHT if kind == "backward"):
            given = sum(sum(reported[name][1]) for reported in ranks)
            assert given == pytest.approx(2 * sum(alone[name][1]), rel=1e-5)
