"""Law 2. `grad_norm` is that of the whole gradient, unscaled, before clipping, equal on all ranks
and there even when nothing is clipped."""

from __future__ import annotations

from .cases import Refused, check
from .law_1_gradient import ROUNDING
from .refusal import refuses_precision
from .rehearsal import rehearse
from .subject import Subject

CLIPPED = 0.05
"""Below every norm of these problems."""


@check(problem=("regression", "language"), micro_batch=(None, 2), max_grad_norm=(None, CLIPPED))
def norm_is_that_of_one_process(
    subject: Subject, problem: str, micro_batch: int | None, max_grad_norm: float | None
) -> None:
    """With and without clipping, which must not show in it."""
    seen = rehearse(
        subject,
        problem,
        optimizer="SGD",
        steps=6,
        micro_batch=micro_batch,
        max_grad_norm=max_grad_norm,
    )
    seen.require_norms(1e-6)


@check(problem=("regression", "language"))
def norm_under_adamw_is_that_of_one_process(subject: Subject, problem: str) -> None:
    """To the end of a training that clips each update, in groups of three microbatches."""
    seen = rehearse(subject, problem, optimizer="AdamW", micro_batch=2, max_grad_norm=1.0)
    seen.require_norms(1e-6)


@check(precision=("bf16", "fp16", "float8"))
def norm_is_unscaled(subject: Subject, precision: str) -> Refused | None:
    """Within four roundings of the float64 one, whatever the loss was scaled by: each element is
    the product of a forward and a backward, which are rounded both."""
    if precision not in subject.facts.precisions:
        return refuses_precision(subject, precision)
    seen = rehearse(subject, "language", optimizer="SGD", steps=6, precision=precision)
    seen.require_norms(4 * ROUNDING[precision])
    return None


@check()
def clipping_limits_the_update(subject: Subject) -> None:
    """The weights move as in one process with the same limit."""
    rehearse(
        subject, "regression", optimizer="SGD", steps=6, micro_batch=2, max_grad_norm=CLIPPED
    ).require_weights(1e-6)
