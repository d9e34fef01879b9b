"""Finds the first step and quantity in which the records of two runs differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..data.sample_digest import differing_parts
from ..kernel.batches import split_evenly
from ..trainer.settings import PRECISIONS
from ..trainer.tensor_figures import TensorFigures
from .recorded_steps import RecordedStep

__all__ = [
    "Difference",
    "Tolerance",
    "conditions",
    "differences_at",
    "first_difference",
    "tolerance_between",
]

Figures = Mapping[str, TensorFigures]

_SAFETY = 8.0
"""Roundings of the same value on the way from the weights to a figure, beyond those of one sum."""


@dataclass(frozen=True)
class Tolerance:
    """The largest difference of two runs that rounding explains."""

    exact: bool
    """True if runs must be equal bit for bit."""
    per_step: float = 0.0
    """Relative difference for each step that both have computed."""
    same_batches: bool = True
    """True if samples are collated together alike, so that padding cannot differ."""

    def relative(self, steps: int) -> float:
        """Return the relative difference that is allowed after so many steps."""
        return 0.0 if self.exact else self.per_step * max(1, steps)


@dataclass(frozen=True)
class Difference:
    """A quantity that differs in one step."""

    step: int
    quantity: str
    """`learning rate`, `samples`, `random state`, `loss`, `gradient norm`, `gradient NAME` or
    `weight NAME`."""
    first: Any
    second: Any
    relative: float | None = None
    """Size relative to the quantity, where that is a number."""
    bound: float = 0.0
    where: str = ""
    """For samples: which of the global batch, and the rank that reads them. For tensors: the ranks
    that save the parts that differ."""

    def __str__(self) -> str:
        what = f"{self.quantity}{self.where and f' ({self.where})'}"
        if self.relative is None:
            return f"step {self.step}: {what}: {self.first} and {self.second}"
        size = f"{self.relative:.2g} of its size"
        beyond = f", more than {self.bound:.2g}" if self.bound else ""
        return f"step {self.step}: {what}: {self.first} and {self.second} ({size}{beyond})"


def conditions(step: RecordedStep, torch_version: object) -> dict[str, Any]:
    """Return what must be equal for two runs to be equal bit for bit, as far as it is recorded."""
    start = step.start
    return {
        "backend": start.get("backend"),
        "world size": _world(start).get("size"),
        "device": str(_world(start).get("device")).partition(":")[0],
        "precision": _settings(start).get("precision"),
        "torch": torch_version,
        "layout": step.digests.get("layout"),
    }


def tolerance_between(
    first: RecordedStep, second: RecordedStep, torch_versions: tuple[object, object]
) -> Tolerance:
    """Return the tolerance of two runs: none if their driver, world size, device, precision and
    version of torch are the same, and their ranks share the weights alike.

    Otherwise rounding differs. A blocked sum of n numbers has a relative error of about
    `eps * log2(n)`, and each weight takes part in the loss and in the norm, so n is the number of
    parameters. `eps` is that of float32, in which sums are made in each precision. Values that a
    lower precision rounds add twice its `eps`. The error grows with each step.
    """
    ours = conditions(first, torch_versions[0])
    theirs = conditions(second, torch_versions[1])
    sizes = [_settings(step.start).get("micro_batch") for step in (first, second)]
    same_batches = sizes[0] == sizes[1] and ours["world size"] == theirs["world size"]
    if ours == theirs:
        return Tolerance(True, same_batches=same_batches)
    count = first.start.get("num_parameters") or 2
    per_step = _SAFETY * torch.finfo(torch.float32).eps * math.log2(max(2, count))
    lower = [
        torch.finfo(PRECISIONS[name].compute).eps
        for name in (ours["precision"], theirs["precision"])
        if name in PRECISIONS and PRECISIONS[name].compute != torch.float32
    ]
    return Tolerance(False, per_step + 2 * max(lower, default=0.0), same_batches)


def first_difference(
    first: Mapping[int, RecordedStep],
    second: Mapping[int, RecordedStep],
    tolerance: Tolerance,
    since: int,
) -> list[Difference]:
    """Return the differences in the first record in which two runs differ, by step, and the likely
    cause first; empty if all steps that both recorded are equal. `since`: the step from which they
    were computed apart."""
    for number in sorted(first.keys() & second.keys()):
        if found := list(differences_at(first[number], second[number], tolerance, since)):
            return sorted(found, key=lambda each: each.step)
    return []


def differences_at(
    first: RecordedStep, second: RecordedStep, tolerance: Tolerance, since: int
) -> Iterator[Difference]:
    """Yield the differences between records of one step, and of the losses of steps before it."""
    number, bound = first.step, tolerance.relative(first.step - since)
    rates = [step.logged["learning_rate"] for step in (first, second)]
    if rates[0] != rates[1]:
        yield _numbers(number, "learning rate", rates, 0.0)
    samples = _samples(first, second)
    if samples is not None and tolerance.same_batches:
        yield samples
    random = [step.digests["random"] for step in (first, second)]
    if tolerance.exact and random[0] != random[1]:
        yield Difference(number, "random state", random[0], random[1])
    losses = [step.losses for step in (first, second)]
    scales = [abs(x) for each in losses for x in each.values() if x is not None]
    apart = False
    for step in sorted(losses[0].keys() & losses[1].keys()):
        pair = [each[step] for each in losses]
        if _apart(pair, bound, max(scales, default=0.0)):
            apart = True
            yield _numbers(step, "loss", pair, bound)
            break
    norms = [step.logged["grad_norm"] for step in (first, second)]
    norm_is_apart = _apart(norms, bound, 0.0)
    where = _describe_ranks(first, second)
    gradients = first.gradients, second.gradients
    if tolerance.exact and all(gradients):
        yield from _tensors(number, "gradient", *gradients, where)
    if norm_is_apart:
        apart = True
        yield _numbers(number, "gradient norm", norms, bound)
        if not tolerance.exact:
            yield from _gradient_norms(number, *gradients, bound)
    if apart and samples is not None and not tolerance.same_batches:
        yield samples
    if tolerance.exact:
        yield from _tensors(number, "weight", first.weights, second.weights, where)


def _tensors(
    step: int, kind: str, first: Figures, second: Figures, where: str
) -> Iterator[Difference]:
    """Yield the tensors that differ in a bit, the one that differs most first."""
    found = []
    for name in first.keys() & second.keys():
        ours, theirs = first[name], second[name]
        if ours.bits != theirs.bits:
            change = max(abs(ours.norm - theirs.norm), abs(ours.total - theirs.total))
            size = change / max(ours.norm, 1e-30)
            norms = [f"norm {each.norm:.9g}, digest {each.bits:08x}" for each in (ours, theirs)]
            what = f"{kind} {name}"
            found.append(Difference(step, what, norms[0], norms[1], size, where=where))
    yield from sorted(found, key=lambda each: (-(each.relative or 0.0), each.quantity))
    for name in sorted(first.keys() ^ second.keys()):
        a, b = ("there" if name in each else "none" for each in (first, second))
        yield Difference(step, f"{kind} {name}", a, b)


def _gradient_norms(
    step: int, first: Figures, second: Figures, bound: float
) -> Iterator[Difference]:
    """Yield the gradients whose norms differ by more than rounding of the whole norm, the one that
    differs most first."""
    scale = math.hypot(*(each.norm for each in first.values()))
    found = [
        _numbers(step, f"gradient {name}", pair, bound)
        for name in first.keys() & second.keys()
        if _apart(pair := [each[name].norm for each in (first, second)], bound, scale)
    ]
    yield from sorted(found, key=lambda each: -abs(each.first - each.second))


def _describe_ranks(first: RecordedStep, second: RecordedStep) -> str:
    """Describe the ranks whose weights differ, if some do and others do not."""
    texts = [step.digests.get("ranks") or "" for step in (first, second)]
    parts = [[text[at : at + 8] for at in range(0, len(text), 8)] for text in texts]
    ranks = [rank for rank, (a, b) in enumerate(zip(*parts, strict=False)) if a != b]
    if len(parts[0]) != len(parts[1]) or len(ranks) in (0, len(parts[0])):
        return ""
    shown = ", ".join(map(str, ranks[:10])) + (f" and {len(ranks) - 10} more" * (len(ranks) > 10))
    return f"saved by rank {shown}"


def _samples(first: RecordedStep, second: RecordedStep) -> Difference | None:
    ours, theirs = first.digests, second.digests
    counts = ours["samples"], theirs["samples"]
    if 0 in counts:
        return None
    if counts[0] != counts[1]:
        return Difference(first.step, "samples", counts[0], counts[1], where="their number")
    parts = differing_parts(ours["batch"], theirs["batch"])
    if not parts:
        return None
    where = _describe_parts(parts, first)
    places = [f"{each['first_sample']} of epoch {each['epoch']}" for each in (ours, theirs)]
    return Difference(first.step, "samples", places[0], places[1], where=where)


def _describe_parts(parts: Sequence[int], step: RecordedStep) -> str:
    """Describe the samples of parts of a global batch, and which ranks read them."""
    count, num_parts = step.digests["samples"], len(step.digests["batch"]) // 5
    if len(parts) == num_parts:
        return f"all {count} of the global batch"
    per_reader = _world(step.start).get("feeders_per_reader") or 1
    readers = max(1, (_world(step.start).get("num_feeders") or 1) // per_reader)
    found = []
    for part in parts[:5]:
        low, high = -(-part * count // num_parts), -(-(part + 1) * count // num_parts) - 1
        reader = next(
            index for index in range(readers) if low < sum(split_evenly(count, readers, index))
        )
        which = f"{low}" if low == high else f"{low} to {high}"
        found.append(f"{which}, of reader {reader}" if readers > 1 else which)
    more = f" and {len(parts) - 5} parts more" if len(parts) > 5 else ""
    return f"{'; '.join(found)}{more} of {count} in the global batch, counted from 0"


def _apart(pair: Sequence[float | None], bound: float, scale: float) -> bool:
    first, second = pair
    if first is None or second is None:
        return first is not second
    return abs(first - second) > bound * max(abs(first), abs(second), scale)


def _numbers(step: int, quantity: str, pair: Sequence[float | None], bound: float) -> Difference:
    first, second = pair
    if first is None or second is None:
        return Difference(step, quantity, first, second)
    relative = abs(first - second) / max(abs(first), abs(second), 1e-300)
    return Difference(step, quantity, first, second, relative, bound)


def _world(start: Mapping[str, Any]) -> Mapping[str, Any]:
    world = start.get("world")
    return world if isinstance(world, dict) else {}


def _settings(start: Mapping[str, Any]) -> Mapping[str, Any]:
    settings = start.get("settings")
    return settings if isinstance(settings, dict) else {}
