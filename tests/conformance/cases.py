"""Cases of the suite: every check of every law, with every set of its arguments."""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from .subject import Subject

__all__ = ["LAWS", "Case", "ModelRefused", "Refused", "cases", "check"]

LAWS = (
    "law_1_gradient",
    "law_1_absent",
    "law_1_groups",
    "law_1_turns",
    "law_2_norm",
    "law_3_not_applied",
    "law_4_learning_rate",
    "law_5_evaluation",
    "law_5_predictions",
    "law_6_average",
    "law_6_after_update",
    "law_6_resume",
    "law_6_buffers",
    "law_6_extra_state",
    "law_6_files",
    "law_6_lost_ranks",
    "law_6_memory",
    "law_6_random_updates",
    "law_6_streams",
    "law_7_capabilities",
    "law_7_even_blocks",
    "contract_session",
)
"""The modules that hold the checks; each docstring is the law."""


@dataclass(frozen=True)
class Refused:
    """Result of a check whose ability the driver does not have, and refuses properly."""

    message: str


class ModelRefused(Exception):
    """The driver's options refuse the model of a check by name, and no other problem stands in for
    it.
    """


Check = Callable[..., "Refused | None"]
F = TypeVar("F", bound=Check)


def check(**over: Sequence[Any]) -> Callable[[F], F]:
    """Mark a function as a check; it is run with every combination of the arguments listed."""

    def mark(function: F) -> F:
        function.over = over  # type: ignore[attr-defined]
        return function

    return mark


@dataclass(eq=False)
class Case:
    """One check of one driver with one set of arguments."""

    subject: Subject
    law: str
    statement: str
    function: Check
    arguments: Mapping[str, Any]
    allow_unavailable: bool = False
    refused: Refused | None = field(default=None, init=False)
    """Set by `check` where the driver refused: an ability that it does not declare, or a model that
    its options cannot partition.
    """

    def check(self) -> None:
        """Run the check. Raises `LawBroken` when the driver breaks the law, `WorkerFailure` when it
        crashed or hung, `BackendUnavailable` when it cannot run on this machine.
        """
        if self.allow_unavailable and not self.subject.facts.usable:
            import pytest

            pytest.skip(self.subject.facts.reason)
        self.subject.require_usable()
        try:
            self.refused = self.function(self.subject, **self.arguments)
        except ModelRefused as refused:
            self.refused = Refused(str(refused))

    def to_json(self) -> dict[str, Any]:
        """Return the part of the case that reports need."""
        return {
            "subject": self.subject.to_json(),
            "law": self.law,
            "statement": self.statement,
            "check": self.function.__name__,
            "arguments": {key: str(value) for key, value in self.arguments.items()},
        }

    def __str__(self) -> str:
        named = [name_of(key, value) for key, value in self.arguments.items() if value is not None]
        return "-".join((self.law, self.function.__name__, *named))


def name_of(key: str, value: Any) -> str:
    """Return the value as part of a test's id; numbers are preceded by the argument's name."""
    if isinstance(value, tuple):
        value = "_".join(map(str, value))
    return str(value) if str(value).isidentifier() else f"{key}={value}"


def cases(
    backend: str,
    *,
    num_processes: int | None = None,
    options: Mapping[str, Any] | None = None,
    peers: Sequence[str] | None = None,
    allow_unavailable: bool = False,
    python: str | None = None,
) -> list[Case]:
    """Return all cases for the driver of that name, the same for every driver. Starts nothing.

    `num_processes`: the world size, by default 2 where the driver supports it. `options`: the
    driver's own options. `peers`: drivers (`NAME` or `NAME:PROCESSES`) whose checkpoints must be
    exchangeable with this driver's, by default this driver at other world sizes.
    `allow_unavailable`: skip, with the reason, a driver that cannot run on this machine; by default
    its cases fail. `python`: the interpreter of the ranks, when the driver is installed in another
    environment.
    """
    subject = Subject(backend, num_processes, options or {}, peers, python=python)
    return [
        Case(subject, law, statement, function, arguments, allow_unavailable)
        for law, statement, function in checks()
        for arguments in combinations(function.over)  # type: ignore[attr-defined]
    ]


def checks() -> Iterator[tuple[str, str, Check]]:
    """Yield the law, its text and a check, in the order of the source."""
    for name in LAWS:
        module = importlib.import_module(f"{__package__}.{name}")
        for function in vars(module).values():
            if inspect.isfunction(function) and hasattr(function, "over"):
                yield (
                    name.removeprefix("law_").removeprefix("contract_"),
                    inspect.getdoc(module) or "",
                    function,
                )


def combinations(over: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*over.values()):
        yield dict(zip(over, values, strict=True))
