"""Ranks that were not started alike are refused, with what differs and on which ranks."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain import Recipe, Settings
from drivetrain.kernel.errors import CollectiveFailed
from drivetrain.kernel.plan import Probe
from drivetrain.kernel.registry import find_driver
from drivetrain.kernel.step import Stepper
from drivetrain.trainer.start_checks import agree, start_conditions

from .thread_world import ThreadSession, Together

CPU: Any = find_driver("cpu")


class OfTwo:
    """The session of rank 0; rank 1 was started with `others`."""

    def __init__(self, others: dict[str, Any]) -> None:
        self.world = type("World", (), {"rank": 0})
        self.others = {key: str(value) for key, value in others.items()}

    def exchange(self, value: Any) -> list[Any]:
        return [value, self.others]


class Driver:
    """`cpu`, with another version of something, name or options."""

    def __init__(self, name: str = "cpu", **versions: str) -> None:
        self.name, self.versions, self.options_type = name, versions, CPU.options_type

    def probe(self) -> Probe:
        return Probe(True, versions=self.versions)


def loss(module: nn.Module, batch: Tensor) -> Tensor:
    result: Tensor = module(batch).square().sum()
    return result


def recipe(count: Callable[[Any], int] | None = None, size: int = 4) -> Recipe:
    model = functools.partial(nn.Linear, 3, 1)
    return Recipe(model, loss, train_data=list(torch.zeros(size, 3)), count_items=count)


def conditions(driver: Any = CPU, what: Recipe | None = None, **changes: Any) -> dict[str, Any]:
    settings, threads = Settings(), changes.pop("threads", None)
    plan = settings.plan(CPU.options_type(threads=threads))
    return start_conditions(driver, plan, what or recipe(), replace(settings, **changes))


def test_ranks_that_were_started_alike_go_on() -> None:
    agree(OfTwo(conditions()), conditions())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("here", "there", "told"),
    [
        ({"seed": 1}, {"seed": 2}, "seed is 1 on rank 0 and 2 on rank 1"),
        (
            {"driver": Driver(vendor="1.0")},
            {"driver": Driver(vendor="1.1")},
            "version of vendor is 1.0 on rank 0 and 1.1 on rank 1",
        ),
        (
            {"driver": Driver()},
            {"driver": Driver(vendor="1.1")},
            "version of vendor is absent on rank 0 and 1.1 on rank 1",
        ),
        (
            {"driver": Driver("one")},
            {"driver": Driver("other")},
            "backend is one on rank 0 and other on rank 1",
        ),
        ({"threads": 2}, {"threads": 3}, "backend.threads is 2 on rank 0 and 3 on rank 1"),
        (
            {},
            {"what": recipe(size=5)},
            "recipe.train_data is builtins.list of 4 samples on rank 0 and builtins.list of 5 s",
        ),
        ({}, {"what": recipe(len)}, "recipe.count_items is absent on rank 0 and builtins.len"),
        (
            {"what": recipe(lambda batch: len(batch) + 2)},
            {"what": recipe(lambda batch: len(batch) + 1)},
            "test_agreement.<lambda> (",
        ),
    ],
)
def test_what_differs_is_told(here: dict[str, Any], there: dict[str, Any], told: str) -> None:
    with pytest.raises(CollectiveFailed, match="ranks 0 and 1 were not started alike") as caught:
        agree(OfTwo(conditions(**there)), conditions(**here))  # type: ignore[arg-type]
    assert told in str(caught.value)


def test_the_versions_that_matter_are_compared() -> None:
    compared = conditions()
    for name in ("python", "torch", "drivetrain"):
        assert compared[f"version of {name}"]


def test_a_function_is_known_by_what_it_does() -> None:
    source = "def count(batch):\n    return len(batch) if {names} else (lambda: 2)()\n"

    def made(names: str, where: str) -> str:
        scope: dict[str, Any] = {"__name__": "m"}
        exec(compile(source.format(names=names), where, "exec"), scope)
        return str(conditions(what=recipe(scope["count"]))["recipe.count_items"])

    assert made("batch in {'a', 'b', 'c'}", "one.py") == made("batch in {'c', 'b', 'a'}", "two.py")
    assert made("batch in {'a'}", "one.py") != made("batch in {'b'}", "one.py")


class Engine:
    """As much of one as a forward needs."""

    module = nn.Linear(3, 1)

    def microbatch(self, last: bool) -> Any:
        return contextlib.nullcontext()

    def autocast(self) -> Any:
        return contextlib.nullcontext()


def test_ranks_in_different_steps_end_before_the_update() -> None:
    together, told = Together(2), ["", ""]

    def run(rank: int) -> None:
        stepper = Stepper(recipe(), Engine(), ThreadSession(rank, together))  # type: ignore[arg-type]
        try:
            stepper(iter([(torch.ones(1, 3), 1.0)]), 1, 1.0, lambda: None, (), 3 + rank)
        except CollectiveFailed as error:
            told[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for words in told:
        assert "ranks are in different steps: rank 0 in step 3, rank 1 in step 4" in words
