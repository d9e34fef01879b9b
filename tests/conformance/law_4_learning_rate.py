"""Law 4. An update takes the learning rate that was written before it, and leaves no gradient."""

from __future__ import annotations

from typing import Any

from .cases import check
from .judge import require_same, require_same_bits
from .rehearsal import rehearse
from .subject import Subject


@check(optimizer=("SGD", "AdamW"))
def each_update_takes_the_rate_written_before_it(subject: Subject, optimizer: str) -> None:
    """Compare rates that jump up and down with the oracle's; one step late would show."""
    rates = [0.02, 0.002, 0.05, 0.0, 0.03, 0.01]
    seen = rehearse(subject, "regression", optimizer=optimizer, steps=len(rates), rates=rates)
    seen.require_losses(2e-6)
    if optimizer == "SGD":
        seen.require_weights(1e-6)


@check()
def a_rate_of_zero_moves_nothing(subject: Subject) -> None:
    """Require that not a bit of the weights changes."""
    seen = rehearse(subject, "regression", optimizer="SGD", steps=3, rates=[0.05, 0, 0], watch=[0])
    require_same_bits("weights", seen.state("final")["weights"], seen.state("after 0")["weights"])


@check(micro_batch=(None, 2))
def no_gradient_is_left(subject: Subject, micro_batch: int | None) -> None:
    """Require a gradient of exactly zero in an update whose losses are all multiplied by zero."""
    _require_none_left(subject, micro_batch=micro_batch)


@check()
def nor_that_of_what_the_optimizer_is_not_given(subject: Subject) -> None:
    """Require the same of parameters that have a gradient, but no optimizer."""
    _require_none_left(subject, left_out=1)


def _require_none_left(subject: Subject, **arguments: Any) -> None:
    seen = rehearse(subject, "regression", optimizer="SGD", steps=4, silent=[1, 3], **arguments)
    require_same(
        "norms of updates without a gradient", [float(seen.norms[i]) for i in (1, 3)], [0.0, 0.0]
    )
