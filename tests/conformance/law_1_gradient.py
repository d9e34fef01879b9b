"""Law 1. The gradient of an update is that of one full batch in one process.

It is the sum over microbatches and the mean over feeders of what was given to `backward`, so that
ragged batches, accumulation and the world size do not show.
"""

from __future__ import annotations

import torch

from . import oracle
from .cases import Refused, check
from .judge import require_close
from .problems import PROBLEMS
from .refusal import refuses_precision
from .rehearsal import rehearse
from .runs import run
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


@check()
def fit_equals_one_process(subject: Subject) -> None:
    """The kernel's own loop, with partial batches that leave some ranks without a sample."""
    ranks = subject.run(
        run,
        problem="language",
        samples=13,
        settings={
            "steps": 9,
            "global_batch": 5,
            "micro_batch": 1,
            "max_grad_norm": None,
            "log_every": 1,
            "optimizer.name": "torch.optim.SGD",
            "optimizer.lr": 0.05,
            "schedule.name": "constant",
        },
    )
    steps = zip(*(rank["ids"] for rank in ranks), strict=True)
    groups = [sorted({index for ids in step for index in ids}) for step in steps]
    torch.manual_seed(0)
    initial = {n: p.detach() for n, p in PROBLEMS["language"].model().named_parameters()}
    expected = oracle.train("language", initial, groups, [0.05] * 9, torch.optim.SGD)
    logged = ranks[0]["logged"]
    require_close("loss of step", [line["loss"] for line in logged], expected.losses, 1e-6)
    require_close("norm of step", [line["grad_norm"] for line in logged], expected.norms, 1e-6)
