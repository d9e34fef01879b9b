"""Law 2. `grad_norm` is the norm of the whole gradient, unscaled and before clipping.

It is equal on all ranks, and reported even when nothing is clipped.
"""

from __future__ import annotations

from typing import Any

from .cases import Refused, check
from .law_1_gradient import ROUNDING, trained_by_adamw
from .refusal import refuses, refuses_precision
from .rehearsal import rehearse
from .subject import Subject

CLIPPED = 0.05
"""A limit below every norm of these problems."""
LOOSE = 1e4
"""A limit above every norm of these problems."""
LIMITED = 0.01
"""A limit below some elements of a gradient that is clipped to that norm, and above others."""


@check(problem=("regression", "language"), micro_batch=(None, 2), max_grad_norm=(None, CLIPPED))
def norm_is_that_of_one_process(
    subject: Subject, problem: str, micro_batch: int | None, max_grad_norm: float | None
) -> None:
    """Compare norms with and without clipping, which must not change them."""
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
    """Compare norms to the end of a training that clips each update, with several microbatches in
    each.
    """
    trained_by_adamw(subject, problem, micro_batch=2).require_norms(1e-6)


@check(precision=("bf16", "fp16", "float8"))
def norm_is_unscaled(subject: Subject, precision: str) -> Refused | None:
    """Require norms within four roundings of the float64 ones, whatever the scale of the loss. Each
    element is a product of a forward and a backward, and both are rounded.
    """
    if precision not in subject.facts.precisions:
        return refuses_precision(subject, precision)
    seen = rehearse(subject, "language", optimizer="SGD", steps=6, precision=precision)
    seen.require_norms(4 * ROUNDING[precision])
    return None


@check()
def clipping_limits_the_update(subject: Subject) -> None:
    """Require the weights to move as in one process with the same limit, be it below every norm or
    above: a gradient is made smaller, and never larger.
    """
    for limit, steps in ((CLIPPED, 6), (LOOSE, 2)):
        seen = rehearse(
            subject,
            "regression",
            optimizer="SGD",
            steps=steps,
            micro_batch=2,
            max_grad_norm=limit,
        )
        seen.require_weights(1e-6)


@check()
def clipping_limits_each_element(subject: Subject) -> Refused | None:
    """Require the same limits on elements as in one process, applied to the complete gradient after
    its norm is clipped. The reported norm is still the one before both.
    """
    limits: dict[str, Any] = {"max_grad_norm": CLIPPED, "max_grad_value": LIMITED}
    if not subject.can("max_grad_value"):
        return refuses(subject, "max_grad_value", "max_grad_value", limits)
    seen = rehearse(subject, "regression", optimizer="SGD", steps=6, micro_batch=2, **limits)
    seen.require_norms(1e-6)
    seen.require_weights(1e-6)
    return None
