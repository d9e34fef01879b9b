"""Law 4. A learning rate written before `update` governs it; after it no gradient is left."""

from __future__ import annotations

from typing import Any

from .cases import check
from .judge import require_same, require_same_bits
from .rehearsal import rehearse
from .subject import Subject


@check(optimizer=("SGD", "AdamW"))
def each_update_takes_the_rate_written_before_it(subject: Subject, optimizer: str) -> None:
    """Rates that jump up and down, against the oracle; one step late would show."""
    rates = [0.02, 0.002, 0.05, 0.0, 0.03, 0.01]
    seen = rehearse(subject, "regression", optimizer=optimizer, steps=len(rates), rates=rates)
    seen.require_losses(2e-6)
    if optimizer == "SGD":
        seen.require_weights(1e-6)


@check()
def a_rate_of_zero_moves_nothing(subject: Subject) -> None:
    """Not a bit of the weights."""
    seen = rehearse(subject, "regression", optimizer="SGD", steps=3, rates=[0.05, 0, 0], watch=[0])
    require_same_bits("weights", seen.state("final")["weights"], seen.state("after 0")["weights"])


@check(micro_batch=(None, 2))
def no_gradient_is_left(subject: Subject, micro_batch: int | None) -> None:
    """An update whose losses are all multiplied by zero has a gradient of exactly zero."""
    _require_none_left(subject, micro_batch=micro_batch)


@check()
def nor_that_of_what_the_optimizer_is_not_given(subject: Subject) -> None:
    """Parameters that require a gradient, and that nothing updates."""
    _require_none_left(subject, left_out=1)


def _require_none_left(subject: Subject, **arguments: Any) -> None:
    seen = rehearse(subject, "regression", optimizer="SGD", steps=4, silent=[1, 3], **arguments)
    require_same(
        "norms of updates without a gradient", [float(seen.norms[i]) for i in (1, 3)], [0.0, 0.0]
    )
