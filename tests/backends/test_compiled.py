"""Compiled models, by the driver or the recipe: they train as others do, or are refused by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from environments import python_of_all
from few_cases import only_quick
from small_networks import SETTINGS, Blocks, copied
from test_attached import recipe
from test_forward_writes import REFUSED, ClampsInside, InPlace, Momentum, clipping
from torch import Tensor, nn

from drivetrain.conformance.bench import Bench
from drivetrain.conformance.subject import Subject
from drivetrain.kernel.errors import RecipeError
from drivetrain.kernel.events import StepEnded

COMPILED: dict[str, Any] = {"compile": True, "compile_options": {"backend": "eager"}}
DRIVERS = {
    "cpu": Subject("cpu"),
    "ddp": Subject("ddp", 2),
    "fsdp": Subject("fsdp", 2),
    "shard": Subject("mesh", 2),
    "zero-2": Subject("deepspeed", 2, {"stage": 2}, python=python_of_all()),
    "zero-3": Subject("deepspeed", 2, {"stage": 3}, python=python_of_all()),
    "ipex": Subject("ipex", 1, {"weights_prepack": False}, python=python_of_all()),
    "xla": Subject("xla", options={"devices": 1}, python=python_of_all()),
}
CANNOT_COMPILE = ("zero-3", "ipex", "xla")
"""Drivers that refuse `compile`. The recipe may compile blocks on them."""
QUICK = ("cpu", "ddp", "fsdp")


def all_but(*others: str) -> list[Any]:
    """Return the drivers without these, as parameters of a test."""
    return only_quick([name for name in DRIVERS if name not in others], QUICK)


def double(part: Any, given: Any, made: Tensor) -> Tensor:
    return made * 2.0


def shrink(part: Any, given: Any, made: Any) -> Any:
    """A backward hook that is not linear."""
    return tuple(grad / (1.0 + grad.norm()) for grad in given)


def trained(
    bench: Bench, *, kinds: Sequence[str], compiles: str = ""
) -> dict[str, dict[str, Tensor] | str]:
    """A job: return, for each kind, the trained weights, or the message of the refusal. `compiles`:
    "driver", or "recipe", which compiles each block by itself.
    """
    reported: dict[str, dict[str, Tensor] | str] = {}
    for kind in kinds:
        built: list[Blocks] = []
        kept = recipe(lambda kind=kind, built=built: network(kind, compiles == "recipe", built))
        if kind == "clipping":
            kept = dataclasses.replace(kept, loss=clipping)

        def register(event: object, kind: str = kind, built: list[Blocks] = built) -> None:
            if kind == "a hook after step 1" and isinstance(event, StepEnded) and event.step == 1:
                built[-1].blocks[1].up.register_forward_hook(double)

        settings = {**SETTINGS, **(COMPILED if compiles == "driver" else {})}
        try:
            run = bench.fit(kept, settings, finish=copied, observers=[register])
            reported[kind] = run.finish
        except RecipeError as error:
            reported[kind] = str(error)
    return reported


def network(kind: str, compiles: bool, built: list[Blocks]) -> nn.Module:
    made = {"Momentum": Momentum, "InPlace": InPlace, "ClampsInside": ClampsInside}.get(
        kind, Blocks
    )()
    built.append(made)
    if kind == "a hook on one layer":
        made.blocks[1].up.register_forward_hook(double)
    if kind == "a backward hook":
        made.blocks[1].up.register_full_backward_hook(shrink)
    for block in made.blocks if compiles else ():
        block.compile(backend="eager")
    return made


def compiling(name: str, request: pytest.FixtureRequest) -> Sequence[str]:
    """Return who can compile on this driver."""
    if DRIVERS[name].python:
        request.getfixturevalue("environment_of_all")
    return ("recipe",) if name in CANNOT_COMPILE else ("driver", "recipe")


@pytest.mark.parametrize("driver", all_but())
def test_hooks_of_one_block_are_called(driver: str, request: pytest.FixtureRequest) -> None:
    """Require each hook, which torch's compiler by default takes over from another block."""
    kinds = ["a hook on one layer", "a hook after step 1"]
    (alone,) = Subject("cpu").run(trained, kinds=kinds)
    for compiles in compiling(driver, request):
        for reported in DRIVERS[driver].run(trained, kinds=kinds, compiles=compiles):
            for kind in kinds:
                assert not isinstance(reported[kind], str), reported[kind]
                for key, expected in alone[kind].items():
                    assert torch.allclose(reported[kind][key], expected, atol=1e-6), (kind, key)


@pytest.mark.parametrize("driver", all_but("cpu", "ddp", "ipex", "xla"))
def test_writes_of_compiled_code_are_refused(driver: str, request: pytest.FixtureRequest) -> None:
    """Require the refusals of what is not compiled: on these drivers the writes would be lost."""
    kinds = ["Momentum", "InPlace", "ClampsInside"]
    kinds += ["clipping"] if driver.startswith("zero") else []
    for compiles in compiling(driver, request):
        for reported in DRIVERS[driver].run(trained, kinds=kinds, compiles=compiles):
            for kind in kinds:
                message = reported[kind]
                assert isinstance(message, str), f"{kind} was not refused"
                assert message.startswith(tuple(REFUSED[kind])), message
                assert "Recipe.after_update" in message


@pytest.mark.parametrize("driver", all_but("cpu", "ipex", "xla"))
def test_backward_hooks_in_compiled_code_are_tried(
    driver: str, request: pytest.FixtureRequest
) -> None:
    for compiles in compiling(driver, request):
        for reported in DRIVERS[driver].run(trained, kinds=["a backward hook"], compiles=compiles):
            assert "module 'blocks.1.up' as a backward hook" in reported["a backward hook"]
