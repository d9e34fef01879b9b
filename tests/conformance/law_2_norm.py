"""Law 2. `grad_norm` is that of the whole gradient, unscaled, before clipping, equal on all ranks
and there even when nothing is clipped."""

from __future__ import annotations

import torch

from .cases import Refused, check
from .judge import require, require_close
from .law_1_gradient import ROUNDING
from .refusal import refuses_precision
from .rehearsal import Rehearsal, rehearse
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
    require_norms(seen, 1e-6)


@check(problem=("regression", "language"))
def norm_under_adamw_is_that_of_one_process(subject: Subject, problem: str) -> None:
    """To the end of a training that clips each update, in groups of three microbatches."""
    require_norms(
        rehearse(subject, problem, optimizer="AdamW", micro_batch=2, max_grad_norm=1.0), 1e-6
    )


@check(precision=("bf16", "fp16"))
def norm_is_unscaled(subject: Subject, precision: str) -> Refused | None:
    """Within four roundings of the float64 one, whatever the loss was scaled by: each element is
    the product of a forward and a backward, which are rounded both."""
    if precision not in subject.facts.precisions:
        return refuses_precision(subject, precision)
    seen = rehearse(subject, "language", optimizer="SGD", steps=6, precision=precision)
    require_norms(seen, 4 * ROUNDING[precision])
    return None


@check()
def clipping_limits_the_update(subject: Subject) -> None:
    """The weights move as in one process with the same limit."""
    rehearse(
        subject, "regression", optimizer="SGD", steps=6, micro_batch=2, max_grad_norm=CLIPPED
    ).require_weights(1e-6)


def require_norms(seen: Rehearsal, relative: float) -> None:
    """A 0-d float32 tensor, the same bits on all ranks, near the oracle's."""
    for norm in seen.norms:
        form = f"{norm.dtype}{tuple(norm.shape)}"
        require(
            norm.dim() == 0 and norm.dtype == torch.float32,
            f"grad_norm is {form}, it must be a 0-d float32",
        )
    norms = [float(norm) for norm in seen.norms]
    for rank, other in enumerate(seen.ranks):
        require_close(f"grad_norm on rank {rank}", [float(n) for n in other["norms"]], norms, 0.0)
    done = [norm for norm, applied in zip(norms, seen.applied, strict=True) if applied]
    require_close("grad_norm of update", done, seen.expected.norms, relative)
