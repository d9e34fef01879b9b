"""Hooks on modules that are not linear layers: each driver trains as one process does, and passes
the same gradients to the hooks, or refuses a hook by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from few_cases import only_quick
from small_networks import SETTINGS, Transformer, copied
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from drivetrain import Parallel, Recipe
from drivetrain.conformance.bench import Bench
from drivetrain.conformance.harness import WorkerFailure
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
    the input, beside one that appends the size of the output's gradient to `seen`.
    """
    model = Transformer()
    part = model.get_submodule(where)

    def look(module: nn.Module, given: Any, made: Any) -> None:
        if model.training:
            seen.append(sum(float(grad.abs().sum()) for grad in made if grad is not None))

    if kind == "backward":
        part.register_full_backward_hook(look)
        part.register_full_backward_hook(
            lambda part, given, made: tuple(g if g is None else g * 0.5 for g in given)
        )
    elif kind in CHANGES:
        part.register_forward_hook(CHANGES[kind])
    elif kind.startswith("pre "):
        change = GRADIENTS[kind.removeprefix("pre ")]
        part.register_full_backward_pre_hook(lambda part, made: _each(change, made))
    else:
        change = GRADIENTS[kind.removeprefix("full ")]
        part.register_full_backward_hook(lambda part, given, made: _each(change, given))
    return model


def _clip(grad: Tensor) -> Tensor:
    return grad * (0.01 / (grad.norm() + 1e-9)).clamp(max=1.0)


def _clamp_in_place(grad: Tensor) -> None:
    grad.clamp_(-0.002, 0.002)


GRADIENTS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "halved": lambda grad: grad * 0.5,
    "clamped": lambda grad: grad.clamp(-0.002, 0.002),
    "clamped in place": _clamp_in_place,
    "clipped": _clip,
    "noisy": lambda grad: grad + 0.1 * grad.abs().mean() * torch.randn_like(grad),
    "over samples": lambda grad: grad - grad.mean(0, keepdim=True),
}


def _each(change: Callable[[Tensor], Tensor | None], grads: Any) -> Any:
    made = tuple(grad if grad is None else change(grad) for grad in grads)
    return (
        None if any(m is None and g is not None for m, g in zip(made, grads, strict=True)) else made
    )


def loss(module: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(module(batch["x"]).flatten(0, 1), batch["y"].flatten(), reduction="sum")


def trained(
    bench: Bench, *, hooks: Sequence[Sequence[str]], micro_batch: int | None = 2
) -> dict[str, Any]:
    """A job: return, for each hook, the trained weights and the gradients' sizes that the hook saw,
    or the message of the refusal.
    """
    settings = {**SETTINGS, "steps": 2, "micro_batch": micro_batch}
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
            weights = bench.fit(recipe, settings, finish=copied).finish
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
RIGHT = [
    *(("backward", name) for name in ("norm", "rows", "blocks.1.attention")),
    *(("scale", name) for name in ("rows", "blocks.1.attention")),
    *(("clamp", name) for name in ("blocks.0.norm", "blocks.1.down")),
]
OF_ALL_POSITIONS = [("mean", "blocks.0.norm"), ("mean", "rows")]


@pytest.mark.parametrize(
    ("driver", "of_each"),
    only_quick([("tensor", 4), *((driver, 1) for driver in SUBJECTS)], [("tensor", 4)]),
)
def test_hooks_of_modules_act_as_in_one_process_or_are_refused(driver: str, of_each: int) -> None:
    """Try one of `of_each` hooks."""
    hooks = [*RIGHT, *OF_ALL_POSITIONS][::of_each]
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
        for name in [name for name in alone if name.startswith("backward")]:
            given = sum(sum(reported[name][1]) for reported in ranks)
            assert given == pytest.approx(2 * sum(alone[name][1]), rel=1e-5)


SUBJECTS_OF_GRADIENTS = {
    "ddp": Subject("ddp", 2),
    "zero-1": Subject("deepspeed", 2, {"stage": 1}),
    "zero-2": Subject("deepspeed", 2, {"stage": 2}),
    "shard": Subject("mesh", 2),
    **SUBJECTS,
}
LINEAR = [
    *(("full halved", name) for name in ("blocks.0.up", "blocks.0.attention.out", "head")),
    *(("pre halved", name) for name in ("rows", "blocks.0.attention.qkv", "blocks.1.down")),
]
INEXACT = [
    ("full clamped", "blocks.0.up"),
    ("full clipped", "blocks.0.norm"),
    ("full noisy", "blocks.1"),
    ("full over samples", "norm"),
    ("pre clamped", "blocks.1.attention.qkv"),
    ("pre clipped", "rows"),
    ("pre clamped in place", "head"),
]


@pytest.mark.parametrize("driver", only_quick(SUBJECTS_OF_GRADIENTS, ("ddp",)))
def test_backward_hooks_that_are_not_linear_are_refused(driver: str) -> None:
    subject, inexact = SUBJECTS_OF_GRADIENTS[driver], INEXACT
    if driver == "pipeline":  # the rank of the module's stage refuses, and ends the others
        kind, where = INEXACT[0]
        with pytest.raises(WorkerFailure, match=f"is registered on module '{where}' as a backward"):
            subject.run(trained, hooks=[(kind, where)])
        inexact = []
    (alone,) = Subject("cpu").run(trained, hooks=LINEAR)
    for reported in subject.run(trained, hooks=[*LINEAR, *inexact]):
        for name, (weights, _) in alone.items():
            assert not isinstance(reported[name], str), reported[name]
            for key, expected in weights.items():
                assert torch.allclose(reported[name][0][key], expected, atol=1e-6), (name, key)
        for kind, where in inexact:
            message = reported[f"{kind} {where}"]
            assert isinstance(message, str), f"{kind} {where} was not refused"
            assert f"is registered on module {where!r} as a backward hook" in message, message
            assert "set max_grad_norm or max_grad_value; or train in one process" in message


def test_in_one_process_a_backward_hook_need_not_be_linear() -> None:
    """Require that it changes each sample by itself where an update has several microbatches."""
    bench = Bench("cpu", {})
    whole = trained(bench, hooks=INEXACT, micro_batch=None)
    parts = trained(bench, hooks=INEXACT)
    for kind, where in INEXACT:
        name = f"{kind} {where}"
        if "clamped" not in kind:
            assert "computes with several samples at once" in parts[name], parts[name]
            continue
        for key, expected in whole[name][0].items():
            assert torch.allclose(parts[name][0][key], expected, atol=1e-6), (name, key)


def test_a_backward_hook_that_begins_to_change_gradients_is_refused() -> None:
    """Require the refusal before the update in which the hook first does more than to look."""
    seen: list[float] = []

    def model() -> Transformer:
        made = Transformer()

        def late(part: nn.Module, given: Any, made: Any) -> Any:
            seen.append(0.0)
            return None if len(seen) < 11 else tuple(grad / grad.norm() for grad in given)

        made.blocks[0].register_full_backward_hook(late)
        return made

    rows = torch.randint(8, (24, 6), generator=torch.Generator().manual_seed(0))
    recipe = Recipe(model, loss, [{"x": row, "y": row.roll(1)} for row in rows])
    with pytest.raises(RecipeError, match=r"late' is registered on module 'blocks\.0'"):
        Bench("cpu", {}).fit(recipe, SETTINGS)
