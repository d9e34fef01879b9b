"""Ranks that were started differently are refused; the message names the differences
and the ranks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from data.thread_world import on_ranks
from torch import Tensor, nn

from drivetrain import Recipe, Settings
from drivetrain.kernel.errors import CollectiveFailed
from drivetrain.kernel.plan import Probe
from drivetrain.kernel.step import Stepper, StepPlace
from drivetrain.registry import find_driver
from drivetrain.trainer.start_checks import agree, start_conditions

CPU: Any = find_driver("cpu")


class OfTwo:
    """The session of rank 0 of two. Rank 1 was started with the conditions `others`."""

    def __init__(self, others: dict[str, Any]) -> None:
        self.world = type("World", (), {"rank": 0})
        self.others = {key: str(value) for key, value in others.items()}

    def exchange(self, value: Any) -> list[Any]:
        return [value, self.others]


class Driver:
    """A copy of the `cpu` driver, with another version of something, name or options."""

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


def test_ranks_that_were_started_alike_train() -> None:
    agree(OfTwo(conditions()), conditions())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("here", "there", "message"),
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
            "test_start_checks.<lambda> (",
        ),
    ],
)
def test_what_differs_is_reported(
    here: dict[str, Any], there: dict[str, Any], message: str
) -> None:
    with pytest.raises(CollectiveFailed, match="ranks 0 and 1 were not started alike") as caught:
        agree(OfTwo(conditions(**there)), conditions(**here))  # type: ignore[arg-type]
    assert message in str(caught.value)


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
    """Stand-in for an engine, with the parts that a forward needs."""

    module = nn.Linear(3, 1)

    def microbatch(self, last: bool) -> Any:
        return contextlib.nullcontext()

    def autocast(self) -> Any:
        return contextlib.nullcontext()


STEP_3 = StepPlace(3, 1, 16, 8)


@pytest.mark.parametrize(
    ("places", "named"),
    [
        ([StepPlace(3), StepPlace(4)], ["rank 0 in step 3,", "rank 1 in step 4,"]),
        # the mean of the others, which sees that they differ all the same
        ([StepPlace(3), StepPlace(4), StepPlace(5)], ["rank 1 in step 4,", "rank 2 in step 5,"]),
        (
            [STEP_3, STEP_3._replace(num_samples=5)],
            ["rank 0 in step 3, with 8 samples after 16 of epoch 1", "with 5 samples"],
        ),
        (
            [STEP_3, STEP_3._replace(epoch=2, start=0)],
            ["8 samples after 16 of epoch 1", "8 samples after 0 of epoch 2"],
        ),
        ([STEP_3, STEP_3._replace(num_samples=0)], ["with no more samples after 16 of epoch 1"]),
        ([STEP_3._replace(digest=1), STEP_3._replace(digest=2)], ["(digest 1)", "(digest 2)"]),
    ],
)
def test_ranks_in_different_places_end_before_the_update(
    places: list[StepPlace], named: list[str]
) -> None:
    def job(session: Any) -> None:
        stepper = Stepper(recipe(), Engine(), session)  # type: ignore[arg-type]
        place = places[session.world.rank]
        if not place.num_samples and place.epoch:  # its data has ended
            stepper.compare(place, 0.0, ())
            stepper.sums()
        stepper(iter([(torch.ones(1, 3), 1.0)]), 1, 1.0, lambda: None, (), place)

    for error in on_ranks(job, len(places)):
        assert isinstance(error, CollectiveFailed)
        assert "ranks are in different steps, or have different data: " in str(error)
        assert all(words in str(error) for words in named)
