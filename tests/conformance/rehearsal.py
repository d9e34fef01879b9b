"""A short training on the driver beside the same one by the oracle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from . import oracle
from .jobs import train
from .judge import require, require_close
from .optimizers import optimizer_class
from .refusal import problem_for
from .state import State, assemble
from .subject import Subject

__all__ = ["Rehearsal", "consecutive", "rehearse"]

GROUP_SIZES = (12, 12, 7)
"""Samples in an update, over and over: two full batches and a ragged one that ends an epoch."""

RATES = {"SGD": 0.05, "AdamW": 0.01, "Counting": 0.05, "Estimating": 0.5}


@dataclass(frozen=True)
class Rehearsal:
    """The driver's results, and the oracle's from the same initial weights, over the updates that
    were applied.
    """

    problem: str
    groups: list[list[int]]
    rates: list[float]
    optimizer: str
    max_grad_norm: float | None
    ranks: list[dict[str, Any]]
    max_grad_value: float | None = None

    @property
    def losses(self) -> list[float]:
        """Mean loss an item of each update."""
        return list(self.ranks[0]["losses"])

    @property
    def applied(self) -> list[bool]:
        """For each update, whether it changed the weights."""
        return list(self.ranks[0]["applied"])

    @property
    def norms(self) -> list[Tensor]:
        """`Outcome.grad_norm` of each update."""
        return list(self.ranks[0]["norms"])

    def state(self, when: str) -> State:
        """Return the state at `initial`, `final` or, for watched steps, `after N`."""
        return assemble([rank["states"][when] for rank in self.ranks])

    @cached_property
    def expected(self) -> oracle.Trained:
        done = [step for step, applied in enumerate(self.applied) if applied]
        return oracle.train(
            self.problem,
            self.state("initial")["weights"],
            [self.groups[step] for step in done],
            [self.rates[step] for step in done],
            optimizer_class(self.optimizer),
            self.max_grad_norm,
            self.max_grad_value,
        )

    def require_losses(self, relative: float) -> None:
        """Compare the losses of the applied updates with the oracle's."""
        done = [loss for loss, applied in zip(self.losses, self.applied, strict=True) if applied]
        require_close("loss of update", done, self.expected.losses, relative)

    def require_weights(self, relative: float) -> None:
        """Compare the final weights with the oracle's. The deviation of a tensor is the length of
        the difference relative to the length of the expected tensor.
        """
        final = self.state("final")["weights"]
        for name, expected in self.expected.weights.items():
            deviation = float((final[name].double() - expected).norm() / expected.double().norm())
            require(
                deviation <= relative,
                f"{name} deviates by {deviation:.2g} of its length, allowed {relative:.2g}",
            )

    def require_norms(self, relative: float) -> None:
        """Require norms that are 0-d float32 tensors, the same bits on all ranks, near the
        oracle's.
        """
        for norm in self.norms:
            form = f"{norm.dtype}{tuple(norm.shape)}"
            require(
                norm.dim() == 0 and norm.dtype == torch.float32,
                f"grad_norm is {form}, it must be a 0-d float32",
            )
        norms = [float(norm) for norm in self.norms]
        for rank, other in enumerate(self.ranks):
            theirs = [float(norm) for norm in other["norms"]]
            require_close(f"grad_norm on rank {rank}", theirs, norms, 0.0)
        done = [norm for norm, applied in zip(norms, self.applied, strict=True) if applied]
        require_close("grad_norm of update", done, self.expected.norms, relative)

    def require_one_process(self) -> None:
        """Require the losses, weights and norms of one process."""
        self.require_losses(1e-6)
        self.require_weights(1e-6)
        self.require_norms(1e-5)

    def require_lower_precision(self) -> None:
        """Require losses that show rounding to 8 or 11 bits."""
        pairs = zip(self.losses, self.expected.losses, strict=False)
        largest = max(abs(a - e) / abs(e) for a, e in pairs)
        require(
            largest > 2e-6,
            f"losses as exact ({largest:.2g}) as in float32: was it refused silently?",
        )


_rehearsed: dict[tuple[Subject, str], Rehearsal] = {}


def rehearse(
    subject: Subject,
    problem: str,
    *,
    optimizer: str,
    steps: int = 20,
    groups: list[list[int]] | None = None,
    rates: Sequence[float] | None = None,
    **arguments: Any,
) -> Rehearsal:
    """Train on ragged groups of samples of the problem, or of its stand-in. `arguments`: further
    arguments of the job `train`, settings included. Checks that ask for the same training share
    one, since training costs more than they do.
    """
    problem, groups = problem_for(subject, problem), groups or consecutive(steps)
    rates = list(rates or [RATES[optimizer]] * len(groups))
    job = {**arguments, "problem": problem, "groups": groups, "rates": rates}
    key = subject, json.dumps({**job, "optimizer": optimizer}, sort_keys=True)
    if key not in _rehearsed:
        ranks = subject.run(train, **job, optimizer=optimizer)
        limits = [arguments.get(name) for name in ("max_grad_norm", "max_grad_value")]
        seen = Rehearsal(problem, groups, rates, optimizer, limits[0], ranks, limits[1])
        _rehearsed[key] = seen
    return _rehearsed[key]


def consecutive(steps: int) -> list[list[int]]:
    """Groups of samples, none used twice."""
    groups: list[list[int]] = []
    start = 0
    for step in range(steps):
        size = GROUP_SIZES[step % len(GROUP_SIZES)]
        groups.append(list(range(start, start + size)))
        start += size
    return groups
