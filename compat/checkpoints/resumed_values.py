"""Hyper-parameters of a checkpoint's optimizer beside those that the arguments ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["differing", "with_asked"]

_ARGUMENTS = {
    "lr": ("learning_rate",),
    "initial_lr": ("learning_rate",),
    "betas": ("adam_beta1", "adam_beta2"),
    "eps": ("adam_epsilon",),
}
"""The arguments behind an entry of a group; other entries have the argument's name."""

Values = Mapping[str, Any]
"""The hyper-parameters of one group."""


def differing(saved: Sequence[Values], asked: Sequence[Values]) -> list[str]:
    """Describe each value that differs, once if it does so in all groups alike. The learning rate
    is compared as it was before the schedule."""
    found: dict[tuple[str, str, str], list[int]] = {}
    for number, (then, now) in enumerate(zip(saved, asked, strict=False)):
        for name in then.keys() & now.keys() - _scheduled(then, now):
            for each in _parts(name, then[name], now[name]):
                found.setdefault(each, []).append(number)
    groups = min(len(saved), len(asked))
    return [
        f"{name} is {then} in the checkpoint, and {now} was asked for"
        + ("" if len(numbers) == groups else f" (group {', '.join(map(str, numbers))})")
        for (name, then, now), numbers in sorted(found.items())
    ]


def with_asked(then: Values, now: Values) -> dict[str, Any]:
    """Return the values of a checkpoint's group with those that were asked for. The learning rate
    stays where its schedule is."""
    values = {**then, **{name: value for name, value in now.items() if name in then}}
    if _scheduled(then, now) and then["initial_lr"] and then["lr"] is not None:
        values["lr"] = then["lr"] * now["initial_lr"] / then["initial_lr"]
    return values


def _scheduled(then: Values, now: Values) -> set[str]:
    """Return the name of the rate that a schedule moves, if there is one."""
    return {"lr"} if "initial_lr" in then and "initial_lr" in now else set()


def _parts(name: str, then: Any, now: Any) -> list[tuple[str, str, str]]:
    """Return the name, and both values as text, of what differs."""
    arguments = _ARGUMENTS.get(name, (name,))
    pairs = zip(arguments, _listed(then), _listed(now), strict=False)
    if len(arguments) != len(_listed(then)) or len(arguments) != len(_listed(now)):
        pairs = zip((name,), (then,), (now,), strict=True)
    return [
        (argument, repr(before), repr(after))
        for argument, before, after in pairs
        if _listed(before) != _listed(after)
    ]


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
