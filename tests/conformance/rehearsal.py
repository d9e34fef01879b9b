"""A short training on the driver beside the same one by the oracle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from . import oracle
from .jobs import train
from .judge import LawBroken, require, require_same
from .state import State, assemble
from .subject import Subject

__all__ = ["GROUP_SIZES", "Rehearsal", "rehearse"]

GROUP_SIZES = (12, 12, 7)
"""Samples in an update, over and over: two full batches and a ragged one that ends an epoch."""

RATES = {"SGD": 0.05, "AdamW": 0.01}


@dataclass(frozen=True)
class Rehearsal:
    """What the driver did, what the oracle did."""

    losses: list[float]
    norms: list[float]
    applied: list[bool]
    initial: State
    final: State
    expected: oracle.Trained

    def require_weights(self, relative: float) -> None:
        """The length of the difference, of each tensor, relative to that of the tensor."""
        for name, expected in self.expected.weights.items():
            difference = self.final["weights"][name].double() - expected
            deviation = float(difference.norm() / expected.norm())
            require(
                deviation <= relative,
                f"{name} deviates by {deviation:.2g} of its length, allowed {relative:.2g}",
            )

    def require_other_than_float32(self) -> None:
        """Rounding to 8 or 11 bits shows in the losses."""
        pairs = zip(self.losses, self.expected.losses, strict=True)
        largest = max(abs(a - e) / abs(e) for a, e in pairs)
        require(
            largest > 2e-6, f"losses as exact ({largest:.2g}) as float32: not in this precision"
        )


def rehearse(
    subject: Subject,
    problem: str,
    *,
    optimizer: str,
    steps: int = 20,
    rates: list[float] | None = None,
    **arguments: Any,
) -> Rehearsal:
    """Train on ragged groups, and the oracle from the same initial weights on the groups that were
    applied. Raises `LawBroken` when ranks disagree on a figure."""
    groups = consecutive(steps)
    rates = rates or [RATES[optimizer]] * steps
    ranks = subject.run(
        train, problem=problem, groups=groups, rates=rates, optimizer=optimizer, **arguments
    )
    first = ranks[0]
    for rank, other in enumerate(ranks):
        require_same(f"norms on rank {rank}", texts(other["norms"]), texts(first["norms"]))
        require_same(f"what was applied on rank {rank}", other["applied"], first["applied"])
    initial = assemble([rank["initial"] for rank in ranks])
    done = [step for step, applied in enumerate(first["applied"]) if applied]
    expected = oracle.train(
        problem,
        initial["weights"],
        [groups[step] for step in done],
        [rates[step] for step in done],
        getattr(torch.optim, optimizer),
        arguments.get("max_grad_norm"),
    )
    return Rehearsal(
        first["losses"],
        [one_number(norm) for norm in first["norms"]],
        first["applied"],
        initial,
        assemble([rank["final"] for rank in ranks]),
        expected,
    )


def consecutive(steps: int) -> list[list[int]]:
    """Groups of samples, none used twice."""
    groups, start = [], 0
    for step in range(steps):
        size = GROUP_SIZES[step % len(GROUP_SIZES)]
        groups.append(list(range(start, start + size)))
        start += size
    return groups


def one_number(norm: torch.Tensor) -> float:
    if norm.dim() or norm.dtype != torch.float32:
        raise LawBroken(f"grad_norm is {norm.dtype}{tuple(norm.shape)}, it must be a 0-d float32")
    return float(norm)


def texts(norms: list[torch.Tensor]) -> list[str]:
    """Equal for equal bits, NaN included."""
    return [float(norm).hex() for norm in norms]
