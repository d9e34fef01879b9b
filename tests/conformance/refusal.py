"""Refusals (law 7): of an ability that is not declared, and of a model that a driver's options
cannot partition. Both are refused by name, before anything is started.
"""

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
    """Job that trains with these settings; returns the refusal, or None."""
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
    """Require that every rank refuses in the same words, which contain `what` and name the driver.
    `capability`: the field of `Capabilities` that the refusal must carry. Raises `LawBroken`
    otherwise.
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
    """Job that returns the words in which the model of a problem is refused, or an empty string."""
    with bench.open() as session:
        try:
            session.prepare(PROBLEMS[problem].recipe(optimizer=optimizer_called("SGD")))
        except RecipeError as error:
            return str(error)
    return ""


@functools.cache
def refused_model(subject: Subject, problem: str) -> str:
    """Return the words in which the model of a problem is refused, or an empty string. Each rank
    must refuse in the same words, and name an option that was set. Default options must not refuse.
    """
    if not subject.options:
        return ""
    reported, *others = subject.run(preparing, problem=problem)
    require_same(f"how ranks refuse the model of {problem!r}", others, [reported] * len(others))
    named = any(f"backend.{name}" in reported for name in subject.options)
    require(
        named or not reported,
        f"the model of {problem!r} is refused, and no option named: {reported}",
    )
    return reported


def problem_for(subject: Subject, problem: str) -> str:
    """Return the problem, or its stand-in where the driver's options refuse its model. Raises
    `ModelRefused` where there is no stand-in, and `LawBroken` where the stand-in is refused, too: a
    driver that refused all would have proved nothing.
    """
    reported = refused_model(subject, problem)
    stand_in = PROBLEMS[problem].stand_in
    if not reported:
        return problem
    if stand_in is None:
        raise ModelRefused(reported)
    refused = refused_model(subject, stand_in)
    require(
        not refused, f"{stand_in!r} has layers, sequences and experts to partition, but {refused}"
    )
    subject.stand_ins[problem] = f"{stand_in}: {reported}"
    return stand_in


def refuses_optimizer(subject: Subject, optimizer: str) -> Refused | None:
    """Return the refusal of an optimizer that the driver cannot step, or None. It must name the
    optimizer before the first step.
    """
    problem = problem_for(subject, "regression")
    for reported in subject.run(preparing_optimizer, problem=problem, optimizer=optimizer):
        if reported:
            require(optimizer in reported, f"{optimizer} is refused without its name: {reported}")
            return Refused(reported)
    return None


def preparing_optimizer(bench: Bench, *, problem: str, optimizer: str) -> str:
    """Job that returns the words in which an optimizer is refused, or an empty string."""
    recipe = PROBLEMS[problem].recipe(optimizer=optimizer_called(optimizer))
    try:
        with bench.open() as session:
            session.prepare(recipe)
    except CapabilityRefused as refusal:
        return str(refusal)
    return ""


def refuses_precision(subject: Subject, precision: str) -> Refused:
    """Require the refusal of a precision that is not declared."""
    return refuses(subject, "precisions", precision, {"precision": precision})
