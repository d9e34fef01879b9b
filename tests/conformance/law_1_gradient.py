"""Law 1. The gradient of an update is that of one full batch in one process.

It is the sum over microbatches and the mean over feeders of what was given to `backward`, so that
ragged batches, accumulation and the world size do not show.
"""

from __future__ import annotations

from .cases import Refused, check
from .refusal import refuses_precision
from .rehearsal import rehearse
from .subject import Subject


@check(problem=("regression", "language", "classification"), micro_batch=(None, 2))
def plain_sgd_equals_one_process(subject: Subject, problem: str, micro_batch: int | None) -> None:
    """Nothing but the gradient moves the weights: a wrong scale shows at once."""
    seen = rehearse(subject, problem, optimizer="SGD", micro_batch=micro_batch)
    seen.require_losses(1e-6)
    seen.require_weights(1e-6)


@check(problem=("regression", "language"), micro_batch=(None, 2))
def clipped_adamw_equals_one_process(
    subject: Subject, problem: str, micro_batch: int | None
) -> None:
    """Losses only: the weights of AdamW may differ where a gradient is nearly zero."""
    seen = rehearse(subject, problem, optimizer="AdamW", micro_batch=micro_batch, max_grad_norm=1.0)
    seen.require_losses(2e-6)


@check(precision=("bf16", "fp16"))
def low_precision_stays_near(subject: Subject, precision: str) -> Refused | None:
    """Losses within 1 % of the float64 ones, and not the float32 ones in disguise."""
    if precision not in subject.facts.precisions:
        return refuses_precision(subject, precision)
    seen = rehearse(subject, "language", optimizer="SGD", micro_batch=2, precision=precision)
    seen.require_losses(1e-2)
    seen.require_lower_precision()
    return None
