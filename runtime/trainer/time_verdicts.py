"""Sentences about a run's time, made from numbers alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from .step_clock import (
    COMPUTE,
    COPY,
    DATA,
    EVALUATION,
    OBSERVERS,
    RANKS,
    SAVING,
    STARTING,
    TITLES,
    UPDATE,
)

__all__ = ["REMARKABLE", "Spent", "Synchronisation", "Verdict", "verdicts"]

REMARKABLE = 0.10
"""Share of the time from which a part is remarkable."""
_FEWEST_STEPS = 5
_LEAST_SECONDS = 0.1
"""Time below which nothing is remarkable, whatever its share."""
_LEAST_SECONDS_A_STEP = 0.0005
_OWN = (DATA, COPY, COMPUTE, UPDATE, OBSERVERS)
"""Parts in which a rank keeps others waiting."""


@dataclass(frozen=True)
class Synchronisation:
    """A line of the recipe's code at which the host waits for the device."""

    place: str
    """`recipe.py:12`."""
    count: int
    seconds: float


@dataclass(frozen=True)
class Spent:
    """The time of some steps, in seconds, on this rank where nothing else is said."""

    steps: int
    seconds: Mapping[str, float]
    """By part (`step_clock.PARTS`)."""
    ranks: Sequence[Mapping[str, float]] = ()
    """The same of every rank, in order."""
    data: Literal["indexed", "stream", "batches"] = "indexed"
    """Kind of the training data."""
    workers: int = 0
    """The setting `data.workers`."""
    cores: int = 1
    """Processor cores of this machine that the run may use."""
    samples: int = 0
    batches: int = 0
    """Microbatches."""
    fetch_seconds: float = 0.0
    """Time of fetching the samples, over all workers; 0: not measured."""
    collate_seconds: float = 0.0
    evaluations: int = 0
    saves: int = 0
    saves_in_background: bool = False
    observers: Mapping[str, float] = field(default_factory=dict)
    """By name."""
    synchronisations: Sequence[Synchronisation] = ()
    longest_waits: Sequence[float] = ()
    """Seconds of the longest waits for data."""

    @property
    def total(self) -> float:
        """All seconds, without those of starting."""
        return sum(seconds for part, seconds in self.seconds.items() if part != STARTING)


@dataclass(frozen=True)
class Verdict:
    """A remarkable part of the time."""

    kind: str
    """`input`, `workers`, `collate`, `copy`, `rank`, `evaluation`, `saving`, `observer` or
    `synchronisation`."""
    share: float
    """Share of the time of the steps; of `rank`, by which the others wait for it."""
    text: str


def verdicts(spent: Spent) -> list[Verdict]:
    """The remarkable parts, the largest share first; none for a few steps or a moment."""
    if spent.steps < _FEWEST_STEPS or spent.total <= 0:
        return []
    found = [
        *_of_data(spent),
        *_of_copy(spent),
        *_of_ranks(spent),
        *_of_evaluation(spent),
        *_of_saving(spent),
        *_of_observers(spent),
        *_of_synchronisations(spent),
    ]
    return sorted(found, key=lambda verdict: -verdict.share)


def _remarkable(spent: Spent, seconds: float) -> bool:
    return seconds >= max(REMARKABLE * spent.total, _LEAST_SECONDS)


def _in_each_step(spent: Spent, seconds: float) -> bool:
    return _remarkable(spent, seconds) and seconds >= _LEAST_SECONDS_A_STEP * spent.steps


def _of_data(spent: Spent) -> Iterator[Verdict]:
    waited = spent.seconds.get(DATA, 0.0)
    if not _in_each_step(spent, min(waited, _usual_wait(spent))):
        return
    share = waited / spent.total
    begin = f"{_percent(share)} of the time training waits for data"
    if spent.data == "batches":
        yield Verdict(
            "input",
            share,
            f"{begin}: its own loader gives a batch in {_time(waited / spent.steps)} too much; "
            "give that loader more workers",
        )
        return
    work = spent.fetch_seconds + spent.collate_seconds
    measured = work > 0 and spent.samples > 0
    if not measured:  # workers that training waits for are never idle
        work = waited if spent.workers == 0 else spent.workers * spent.total
    sample = work / max(1, spent.samples)
    who = _workers(spent.workers)
    if spent.data == "stream":
        remedy = (
            "`data.workers=1` reads it beside the training"
            if spent.workers == 0
            else "a stream has one reader: make its samples cheaper, or give data with an index"
        )
        yield Verdict("input", share, f"{begin}: a stream, read by {who}; {remedy}")
        return
    number = _enough_workers(spent, work)
    remedy = f"`data.workers={number}` should end it"
    if number > spent.cores:
        cores = f"{spent.cores} core{'s' * (spent.cores > 1)}"
        remedy += f", if samples mostly wait for files or servers: there are {cores}"
    if measured and spent.collate_seconds >= 0.5 * work:
        batch = _time(spent.collate_seconds / max(1, spent.batches))
        part = _percent(spent.collate_seconds / work)
        yield Verdict(
            "collate",
            share,
            f"{begin}: {who}, `collate` takes {batch} a batch, {part} of the time of fetching; "
            f"make it cheaper, or {remedy}",
        )
        return
    kind = "workers" if spent.workers else "input"
    yield Verdict(kind, share, f"{begin}: {who}, each sample takes {_time(sample)}; {remedy}")


def _usual_wait(spent: Spent) -> float:
    """Return the seconds of waiting for data if the longest waits had been as the others: a machine
    that stops for a moment is no slow loader."""
    others = spent.steps - len(spent.longest_waits)
    return (spent.seconds.get(DATA, 0.0) - sum(spent.longest_waits)) * spent.steps / max(1, others)


def _enough_workers(spent: Spent, work: float) -> int:
    """Return how many do the work in the time of the rest of the steps; more than there are."""
    rest = max(spent.total - spent.seconds.get(DATA, 0.0), 1e-9)
    return max(spent.workers + 1, min(math.ceil(work / rest), 1000))


def _of_copy(spent: Spent) -> Iterator[Verdict]:
    seconds = spent.seconds.get(COPY, 0.0)
    if _in_each_step(spent, seconds):
        share = seconds / spent.total
        yield Verdict(
            "copy",
            share,
            f"{_percent(share)} of the time goes into copying batches to the device, "
            f"{_time(seconds / spent.steps)} a step; make them smaller: narrower integers, or "
            "less padding",
        )


def _of_ranks(spent: Spent) -> Iterator[Verdict]:
    if len(spent.ranks) < 2:
        return
    own = [sum(each.get(part, 0.0) for part in _OWN) for each in spent.ranks]
    slowest = max(range(len(own)), key=own.__getitem__)

    def more_than_others(values: Sequence[float]) -> float:
        others = sorted([*values[:slowest], *values[slowest + 1 :]])
        return values[slowest] - others[len(others) // 2]

    excess = more_than_others(own)
    waits = [each.get(RANKS, 0.0) for each in spent.ranks]
    kept_waiting = min(excess, -more_than_others(waits))
    if not _in_each_step(spent, kept_waiting):
        return
    by_part = {
        part: more_than_others([each.get(part, 0.0) for each in spent.ranks]) for part in _OWN
    }
    part = max(by_part, key=by_part.__getitem__)
    share = kept_waiting / spent.total
    yield Verdict(
        "rank",
        share,
        f"rank {slowest} is slower than the others, which wait for it {_percent(share)} of the "
        f"time: it takes {_time(by_part[part] / spent.steps)} a step more in "
        f"{_named(part)}; compare its machine, and its share of the data",
    )


def _of_evaluation(spent: Spent) -> Iterator[Verdict]:
    seconds = spent.seconds.get(EVALUATION, 0.0)
    if spent.evaluations and _remarkable(spent, seconds):
        share = seconds / spent.total
        yield Verdict(
            "evaluation",
            share,
            f"{_percent(share)} of the time goes into evaluation, "
            f"{_time(seconds / spent.evaluations)} each time; raise `evaluate.every`, or measure "
            "a part by `evaluate.max_batches`",
        )


def _of_saving(spent: Spent) -> Iterator[Verdict]:
    seconds = spent.seconds.get(SAVING, 0.0)
    if spent.saves and _remarkable(spent, seconds):
        share = seconds / spent.total
        other = "" if spent.saves_in_background else ", or set `checkpoint.background=true`"
        yield Verdict(
            "saving",
            share,
            f"{_percent(share)} of the time training stands still for saving, "
            f"{_time(seconds / spent.saves)} each time; raise `checkpoint.every`{other}",
        )


def _of_observers(spent: Spent) -> Iterator[Verdict]:
    seconds = spent.seconds.get(OBSERVERS, 0.0)
    if not _remarkable(spent, seconds):
        return
    share = seconds / spent.total
    name = max(spent.observers, key=spent.observers.__getitem__, default="")
    most = f": mostly `{name}`, {_time(spent.observers[name] / spent.steps)} a step" if name else ""
    yield Verdict(
        "observer",
        share,
        f"{_percent(share)} of the time goes into observers{most}; let it do less, or at fewer "
        "events",
    )


def _of_synchronisations(spent: Spent) -> Iterator[Verdict]:
    found = [each for each in spent.synchronisations if each.count >= 0.5 * spent.steps]
    for each in sorted(found, key=lambda each: -each.seconds):
        share = each.seconds / spent.total
        number = each.count / spent.steps
        often = "once" if number == 1 else f"{number:.3g} times"
        yield Verdict(
            "synchronisation",
            share,
            f"{each.place} waits for the device, {often} a step, {_percent(share)} of "
            "the time: keep the value a tensor (`.detach()`), and read it at a log",
        )


def _named(part: str) -> str:
    return {DATA: "fetching data", COPY: "copying to the device"}.get(part, TITLES[part])


def _workers(number: int) -> str:
    if number == 0:
        return "no worker"
    return f"{number} worker{'s' * (number > 1)}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _time(seconds: float) -> str:
    """`41 ms`."""
    if seconds >= 60:
        return f"{seconds / 60:.3g} min"
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1000 * seconds:.2g} ms" if seconds < 0.0995 else f"{1000 * seconds:.0f} ms"
