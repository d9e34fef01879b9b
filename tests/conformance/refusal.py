"""An ability that is not declared must be refused by name, and nothing started (law 7). So must a
model that cannot be cut as a driver's options ask for."""

from __future__ import annotations

import functools
from typing import Any

from ..kernel.errors import CapabilityRefused, RecipeError
from .bench import Bench
from .cases import ModelRefused, Refused
from .jobs import optimizer_called
from .judge import LawBroken, require, require_same
from .problems import PROBLEMS, Samples
from .subject import Subject

__all__ = ["ask", "problem_for", "refuses", "refuses_optimizer", "refuses_precision"]


def ask(bench: Bench, *, problem: str, settings: dict[str, Any]) -> dict[str, str] | None:
    """A job: train with these settings; how that was refused, or None."""
    recipe = PROBLEMS[problem].recipe(train_data=Samples(problem, 8))
    try:
        bench.fit(recipe, {"steps": 1, "global_batch": 8, **settings})
    except CapabilityRefused as refusal:
        return {
            "asked": refusal.asked,
            "capability": refusal.capability,
            "driver": refusal.driver,
            "message": str(refusal),
        }
    return None


def refuses(
    subject: Subject,
    capability: str,
    what: str,
    settings: dict[str, Any],
    world: int | None = None,
) -> Refused:
    """Every rank refuses in the same words, which say `what`, and names the field of
    `Capabilities`. Raises `LawBroken` otherwise.
    """
    problem = problem_for(subject, "regression")
    first, *others = subject.run(ask, world=world, problem=problem, settings=settings)
    if first is None:
        raise LawBroken(f"{what} is not declared, and asking for it was not refused")
    require(all(other == first for other in others), f"ranks refuse {what} differently")
    require_same("the refused capability", first["capability"], capability)
    require(what in first["asked"], f"{first['asked']!r} was refused where {what!r} was asked")
    named = first["driver"] == subject.facts.name and subject.facts.name in first["message"]
    require(named, f"the refusal does not name the driver: {first}")
    require(what in first["message"], f"the refusal does not say what it refuses: {first}")
    return Refused(first["message"])


def preparing(bench: Bench, *, problem: str) -> str:
    """A job: how the model of a problem is refused; nothing where it is taken."""
    with bench.open() as session:
        try:
            session.prepare(PROBLEMS[problem].recipe(optimizer=optimizer_called("SGD")))
        except RecipeError as error:
            return str(error)
    return ""


@functools.cache
def refused_model(subject: Subject, problem: str) -> str:
    """How the model of a problem is refused, which each rank does in the same words, naming an
    option that was set; nothing where it is taken, as each must be by the defaults."""
    if not subject.options:
        return ""
    told, *others = subject.run(preparing, problem=problem)
    require_same(f"how ranks refuse the model of {problem!r}", others, [told] * len(others))
    named = any(f"backend.{name}" in told for name in subject.options)
    require(named or not told, f"the model of {problem!r} is refused, and no option named: {told}")
    return told


def problem_for(subject: Subject, problem: str) -> str:
    """The problem, or where the driver's options refuse its model, the one that stands in for it.
    Raises `ModelRefused` where none does, and `LawBroken` where that is refused, too: a driver
    that refused all would have proved nothing."""
    told = refused_model(subject, problem)
    stand_in = PROBLEMS[problem].stand_in
    if not told:
        return problem
    if stand_in is None:
        raise ModelRefused(told)
    refused = refused_model(subject, stand_in)
    require(not refused, f"{stand_in!r} has layers, sequences and experts to cut, but {refused}")
    subject.stand_ins[problem] = f"{stand_in}: {told}"
    return stand_in


def refuses_optimizer(subject: Subject, optimizer: str) -> Refused | None:
    """One that a driver cannot step is named, on every rank and before the first step."""
    problem = problem_for(subject, "regression")
    for told in subject.run(preparing_optimizer, problem=problem, optimizer=optimizer):
        if told:
            require(optimizer in told, f"{optimizer} is refused without its name: {told}")
            return Refused(told)
    return None


def preparing_optimizer(bench: Bench, *, problem: str, optimizer: str) -> str:
    """A job: how an optimizer is refused; nothing where it is taken."""
    recipe = PROBLEMS[problem].recipe(optimizer=optimizer_called(optimizer))
    try:
        with bench.open() as session:
            session.prepare(recipe)
    except CapabilityRefused as refusal:
        return str(refusal)
    return ""


def refuses_precision(subject: Subject, precision: str) -> Refused:
    """The precision is not declared."""
    return refuses(subject, "precisions", precision, {"precision": precision})
