"""Law 1. The gradient of an update is that of one full batch in one process.

It is the sum over microbatches and the mean over feeders of what was given to `backward`. Ragged
batches, accumulation and the world size do not change it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..kernel.errors import RecipeError
from . import oracle
from .bench import Bench
from .cases import Refused, check
from .jobs import ReaderBatches, accumulate, microbatches, optimizer_called
from .judge import require, require_close, require_same, require_same_bits
from .problems import PROBLEMS, inside
from .refusal import problem_for, refuses_optimizer, refuses_precision
from .rehearsal import Rehearsal, rehearse
from .runs import run
from .subject import Subject


@check(problem=("regression", "language", "classification"), micro_batch=(None, 2))
def plain_sgd_equals_one_process(subject: Subject, problem: str, micro_batch: int | None) -> None:
    """Compare with one process. Only the gradient moves the weights: a wrong scale shows."""
    seen = rehearse(subject, problem, optimizer="SGD", micro_batch=micro_batch)
    seen.require_one_process()


def trained_by_adamw(subject: Subject, problem: str, micro_batch: int | None) -> Rehearsal:
    """Train by AdamW with clipped gradients. Several checks look at the same training."""
    clipped: dict[str, Any] = {"micro_batch": micro_batch, "max_grad_norm": 1.0}
    return rehearse(subject, problem, optimizer="AdamW", whole=True, **clipped)


@check()
def experts_equal_one_process(subject: Subject) -> None:
    """Require that each expert of a mixture learns from the tokens that the router sends to it."""
    seen = rehearse(subject, "mixture", optimizer="SGD", micro_batch=2, max_grad_norm=1.0)
    seen.require_one_process()


@check()
def copies_stay_equal(subject: Subject) -> None:
    """Require replicated weights to be bit for bit the same on each rank after 20 updates. Copies
    that round differently drift apart, which the loss does not show for long.
    """
    seen = trained_by_adamw(subject, "language", micro_batch=2)
    first, *others = (rank["whole"] for rank in seen.ranks)
    for number, other in enumerate(others, 1):
        require_same_bits(f"weights on rank {number} beside those on rank 0", other, first)


@check()
def a_parameter_of_no_dimension_is_trained(subject: Subject) -> None:
    """Compare a 0-d parameter with one process: its gradient, its part in norm and clipping."""
    seen = rehearse(subject, "scaled", optimizer="SGD", micro_batch=2, max_grad_norm=1.0)
    seen.require_one_process()
    saved = seen.state("final")["weights"]
    shapes = [tuple(tensor.shape) for name, tensor in saved.items() if name.endswith("scale")]
    require(shapes == [()], f"it is saved with the shape {shapes}")


@check(problem=("regression", "language"), micro_batch=(None, 2))
def clipped_adamw_equals_one_process(
    subject: Subject, problem: str, micro_batch: int | None
) -> None:
    """Compare losses only. AdamW divides a gradient by its own size: where it is nothing but
    rounding, as that of the keys' bias in attention, the weights go a step in either direction.
    """
    trained_by_adamw(subject, problem, micro_batch).require_losses(1e-6)


@check(optimizer=("Counting", "Estimating"))
def an_optimizer_takes_one_step_a_step(subject: Subject, optimizer: str) -> Refused | None:
    """Require that an optimizer which counts its steps, or sums over all parameters, is called once
    and sees all of them, or is refused by name before the first step.
    """
    if refused := refuses_optimizer(subject, optimizer):
        return refused
    seen = rehearse(subject, "regression", optimizer=optimizer, micro_batch=2)
    seen.require_one_process()
    return None


ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11, "float8": 2.0**-4}
"""Largest relative error of rounding to 8, 11 or 4 significant bits."""

LOSS_ROUNDINGS = {"SGD": 2, "AdamW": 4}
"""Number of roundings that a mean loss may be off after 20 updates. Of the thousands of rounded
products in a loss, as many are too large as too small. So one rounding nearly covers them, and one
more covers the drift of the weights. AdamW divides each element of the gradient by its own size,
and goes a whole step in the wrong direction where rounding has changed the sign.
"""


@check(precision=("bf16", "fp16", "float8"), optimizer=("SGD", "AdamW"))
def low_precision_stays_near(subject: Subject, precision: str, optimizer: str) -> Refused | None:
    """Require losses within a few roundings of the float64 ones. They must not be the float32
    losses in disguise, nor those of bf16 where float8 was asked for.
    """
    if precision not in subject.facts.precisions:
        return refuses_precision(subject, precision)
    asked: dict[str, Any] = {"optimizer": optimizer, "micro_batch": 2}
    asked["max_grad_norm"] = None if optimizer == "SGD" else 1.0
    seen = rehearse(subject, "language", precision=precision, **asked)
    seen.require_losses(LOSS_ROUNDINGS[optimizer] * ROUNDING[precision])
    seen.require_lower_precision()
    if precision == "float8":
        wider = rehearse(subject, "language", precision="bf16", **asked).losses
        same = [step for step, loss in enumerate(seen.losses) if loss == wider[step]]
        require(not same, f"the losses of steps {same} are bit for bit those of bf16")
    return None


@check()
def fit_equals_one_process(subject: Subject) -> None:
    """Compare the kernel's own loop, with a global batch that grows, and partial batches that leave
    some ranks without a sample: each step counts its own samples, not those of the plan.
    """
    problem = problem_for(subject, "language")
    ranks = subject.run(
        run,
        problem=problem,
        samples=13,
        settings={
            "steps": 9,
            "global_batch": 10,
            "data.batch_warmup": 2,
            "data.batch_warmup_from": 5,
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
    require_same("samples in each step", list(map(len, groups)), [5, 5, 3, *[10, 3] * 3])
    torch.manual_seed(0)
    initial = {n: p.detach() for n, p in PROBLEMS[problem].model().named_parameters()}
    expected = oracle.train(problem, initial, groups, [0.05] * 9, torch.optim.SGD)
    logged = ranks[0]["logged"]
    require_close("loss of step", [line["loss"] for line in logged], expected.losses, 1e-6)
    require_close("norm of step", [line["grad_norm"] for line in logged], expected.norms, 1e-6)


@check()
def parameters_that_no_gradient_reaches_are_named(subject: Subject) -> None:
    """Require the names before the first update, or a refusal that names the parameters."""
    problem = problem_for(subject, "regression")
    for rank, answer in enumerate(subject.run(with_spare_parts, problem=problem)):
        named = answer.get("refused") or ", ".join(answer["unused"])
        require("spare.weight, spare.bias" in named, f"rank {rank} names {named!r}")
        require("used." not in named, f"rank {rank} names {named!r}")


class WithSpareParts(nn.Module):
    def __init__(self, used: nn.Module) -> None:
        super().__init__()
        self.used, self.spare = used, nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Any:
        return self.used(inputs)


def with_spare_parts(bench: Bench, *, problem: str) -> dict[str, Any]:
    """Job that returns the unused parameters after a backward, or the words of a refusal."""
    used = PROBLEMS[problem]
    chosen = replace(
        used, model=lambda: WithSpareParts(used.model()), parallel=inside("used", used.parallel)
    )
    planned: ReaderBatches = [([0, 1], True)]
    with bench.open() as session:
        engine = session.prepare(chosen.recipe(optimizer=optimizer_called("SGD")))
        engine.module.train()
        batches = session.feed(microbatches(chosen, [planned]))
        accumulate(session, engine, chosen, batches, planned)
        try:
            return {"unused": list(engine.unused())}
        except RecipeError as error:
            return {"refused": str(error)}
