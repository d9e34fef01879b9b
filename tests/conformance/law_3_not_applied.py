"""Law 3. A gradient that is not finite is never applied and never hidden.

Wherever it arose, weights and optimizer state keep their bits on all ranks. The schedule of the
learning rate does not advance, and an event reports the skipped update.
"""

from __future__ import annotations

import math
from typing import Any

from ..trainer.schedule import build_schedule
from .cases import Refused, check
from .judge import require, require_close, require_same, require_same_bits
from .refusal import problem_for, refuses_precision
from .rehearsal import Rehearsal, consecutive, rehearse
from .runs import run
from .subject import Subject

BAD_STEP = 2
"""Index of the bad step out of five; it has several microbatches on each feeder."""


@check(precision=("fp32", "bf16", "fp16", "float8"), factor=(math.nan, math.inf))
def one_bad_rank_spoils_the_update_of_none(
    subject: Subject, precision: str, factor: float
) -> Refused | None:
    """Spoil the first microbatch of the last feeder; require that nothing of that step is left."""
    if precision not in subject.facts.precisions:
        return refuses_precision(subject, precision)
    seen = spoiled(subject, precision=precision, factor=factor)
    for kind in ("weights", "optimizer"):
        require_same_bits(
            f"{kind} after a step that is not finite",
            seen.state(f"after {BAD_STEP}")[kind],
            seen.state(f"after {BAD_STEP - 1}")[kind],
        )
    require(seen.applied[-1], "the step after one that is not finite was not applied")
    return None


@check(optimizer=("SGD", "AdamW"))
def training_goes_on_as_if_it_had_not_been(subject: Subject, optimizer: str) -> None:
    """Require the same bits as a training without the bad step's samples."""
    seen = spoiled(subject, precision="fp32", factor=math.nan, optimizer=optimizer)
    groups = consecutive(5)
    del groups[BAD_STEP]
    clean = rehearse(subject, "regression", optimizer=optimizer, groups=groups, micro_batch=2)
    for kind in ("weights", "optimizer"):
        require_same_bits(f"final {kind}", seen.state("final")[kind], clean.state("final")[kind])


@check()
def overflow_of_a_scaled_loss_costs_its_step_alone(subject: Subject) -> Refused | None:
    """Require that a loss too large for float16 is skipped, and training goes on, rescaled."""
    if "fp16" not in subject.facts.precisions:
        return refuses_precision(subject, "fp16")
    seen = spoiled(subject, precision="fp16", factor=1e6, steps=8)
    require_same("updates applied after the overflow", seen.applied[BAD_STEP + 1 :], [True] * 5)
    seen.require_losses(1e-2)
    return None


@check()
def skipped_step_is_told_and_the_clock_waits(subject: Subject) -> None:
    """Train on one sample that is not a number. Its step must be reported on every rank, and the
    next step takes the learning rate of the skipped one.
    """
    settings = {"steps": 6, "global_batch": 4, "optimizer.lr": 0.01, "log_every": 1}
    problem = problem_for(subject, "regression")
    ranks = subject.run(
        run, problem=problem, samples=24, poison=9, settings={**settings, "micro_batch": 1}
    )
    for rank, answer in enumerate(ranks):
        require_same(f"steps reported as skipped on rank {rank}", len(answer["skipped"]), 1)
        bad = answer["skipped"][0]["step"]
        shown = (answer["skipped"][0]["loss"], answer["skipped"][0]["grad_norm"])
        require(not any(map(math.isfinite, shown)), f"skipped, with finite loss and norm: {shown}")
        factor = build_schedule("cosine", total_steps=6, final=0.1)
        clock = [step - (step >= bad) for step in range(6)]
        rates = [logged["learning_rate"] for logged in answer["logged"]]
        require_close("learning rate of step", rates, [0.01 * factor(t) for t in clock], 1e-12)


def spoiled(
    subject: Subject,
    *,
    precision: str,
    factor: float,
    optimizer: str = "AdamW",
    steps: int = 5,
    **arguments: Any,
) -> Rehearsal:
    """Train with the loss of one microbatch multiplied by `factor`. Raises `LawBroken` unless all
    ranks report that this update was not applied, with a norm that is not finite.
    """
    seen = rehearse(
        subject,
        "regression",
        optimizer=optimizer,
        steps=steps,
        micro_batch=2,
        spoil={"step": BAD_STEP, "feeder": -1, "microbatch": 0, "factor": factor},
        watch=[BAD_STEP - 1, BAD_STEP],
        precision=precision,
        **arguments,
    )
    for rank, other in enumerate(seen.ranks):
        require(not other["applied"][BAD_STEP], f"a bad step was applied, says rank {rank}")
        norm = float(other["norms"][BAD_STEP])
        require(not math.isfinite(norm), f"the norm of a bad step is {norm} on rank {rank}")
        require_same(f"what was applied, on rank {rank}", other["applied"], seen.applied)
    return seen
