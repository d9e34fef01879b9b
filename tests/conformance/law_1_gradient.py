"""Law 1. The gradient of an update is that of one full batch in one process.

It is the sum over microbatches and the mean over feeders of what was given to `backward`, so that
ragged batches, accumulation and the world size do not show.
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
from .jobs import Dealt, accumulate, microbatches, optimizer_called
from .judge import require, require_close, require_same_bits
from .problems import PROBLEMS, inside
from .refusal import problem_for, refuses_optimizer, refuses_precision
from .rehearsal import rehearse
from .runs import run
from .subject import Subject


@check(problem=("regression", "language", "classification"), micro_batch=(None, 2))
def plain_sgd_equals_one_process(subject: Subject, problem: str, micro_batch: int | None) -> None:
    """Nothing but the gradient moves the weights: a wrong scale shows at once."""
    seen = rehearse(subject, problem, optimizer="SGD", micro_batch=micro_batch)
    seen.require_one_process()


@check()
def experts_equal_one_process(subject: Subject) -> None:
    """Of a mixture each expert learns of the tokens that the router sends it."""
    seen = rehearse(subject, "mixture", optimizer="SGD", micro_batch=2, max_grad_norm=1.0)
    seen.require_one_process()


@check()
def copies_stay_equal(subject: Subject) -> None:
    """What several ranks hold is bit for bit the same on each after 20 updates: copies that round
    otherwise go apart, and no loss tells for long."""
    seen = rehearse(
        subject, "language", optimizer="AdamW", micro_batch=2, max_grad_norm=1.0, whole=True
    )
    first, *others = (rank["whole"] for rank in seen.ranks)
    for number, other in enumerate(others, 1):
        require_same_bits(f"weights on rank {number} beside those on rank 0", other, first)


@check()
def a_parameter_of_no_dimension_is_trained(subject: Subject) -> None:
    """Its gradient, and its part in the norm and in clipping, are those of one process."""
    seen = rehearse(subject, "scaled", optimizer="SGD", micro_batch=2, max_grad_norm=1.0)
    seen.require_one_process()
    saved = seen.state("final")["weights"]
    shapes = [tuple(tensor.shape) for name, tensor in saved.items() if name.endswith("scale")]
    require(shapes == [()], f"it is saved with the shape {shapes}")


@check(problem=("regression", "language"), micro_batch=(None, 2))
def clipped_adamw_equals_one_process(
    subject: Subject, problem: str, micro_batch: int | None
) -> None:
    """Losses only: AdamW divides a gradient by its own size, so where it is zero but for
    rounding, as of the keys' bias in attention, the weights go a step either way."""
    seen = rehearse(subject, problem, optimizer="AdamW", micro_batch=micro_batch, max_grad_norm=1.0)
    seen.require_losses(1e-6)


@check(optimizer=("Counting", "Estimating"))
def an_optimizer_takes_one_step_a_step(subject: Subject, optimizer: str) -> Refused | None:
    """One that counts its steps, or sums over all parameters, is called once, and sees all of them;
    or it is refused by its name before the first step."""
    if refused := refuses_optimizer(subject, optimizer):
        return refused
    seen = rehearse(subject, "regression", optimizer=optimizer, micro_batch=2)
    seen.require_one_process()
    return None


ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11, "float8": 2.0**-4}
"""How far rounding to 8, 11 or 4 significant bits can be off, relative."""

LOSS_ROUNDINGS = {"SGD": 2, "AdamW": 4}
"""How many of these a mean loss may be off after 20 updates. Of the thousands of rounded products
behind it as many are too large as too small, so that one rounding would nearly do, and another for
where the weights have come to; AdamW divides each element of the gradient by its own size, and so
goes a whole step where a rounded one has lost its sign."""


@check(precision=("bf16", "fp16", "float8"), optimizer=("SGD", "AdamW"))
def low_precision_stays_near(subject: Subject, precision: str, optimizer: str) -> Refused | None:
    """Losses within a few roundings of the float64 ones, and not the float32 ones in disguise, nor
    those of bf16 where that is but what float8 is rounded from."""
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
    """The kernel's own loop, with partial batches that leave some ranks without a sample."""
    problem = problem_for(subject, "language")
    ranks = subject.run(
        run,
        problem=problem,
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
    initial = {n: p.detach() for n, p in PROBLEMS[problem].model().named_parameters()}
    expected = oracle.train(problem, initial, groups, [0.05] * 9, torch.optim.SGD)
    logged = ranks[0]["logged"]
    require_close("loss of step", [line["loss"] for line in logged], expected.losses, 1e-6)
    require_close("norm of step", [line["grad_norm"] for line in logged], expected.norms, 1e-6)


@check()
def parameters_that_no_gradient_reaches_are_named(subject: Subject) -> None:
    """Before the first update, or refused with their names where the driver cannot do with it."""
    problem = problem_for(subject, "regression")
    for rank, told in enumerate(subject.run(with_spare_parts, problem=problem)):
        named = told.get("refused") or ", ".join(told["unused"])
        require("spare.weight, spare.bias" in named, f"rank {rank} names {named!r}")
        require("used." not in named, f"rank {rank} names {named!r}")


class WithSpareParts(nn.Module):
    def __init__(self, used: nn.Module) -> None:
        super().__init__()
        self.used, self.spare = used, nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Any:
        return self.used(inputs)


def with_spare_parts(bench: Bench, *, problem: str) -> dict[str, Any]:
    """A job."""
    used = PROBLEMS[problem]
    chosen = replace(
        used, model=lambda: WithSpareParts(used.model()), parallel=inside("used", used.parallel)
    )
    dealt: Dealt = [([0, 1], True)]
    with bench.open() as session:
        engine = session.prepare(chosen.recipe(optimizer=optimizer_called("SGD")))
        engine.module.train()
        batches = session.feed(microbatches(chosen, [dealt]))
        accumulate(session, engine, chosen, batches, dealt)
        try:
            return {"unused": list(engine.unused())}
        except RecipeError as error:
            return {"refused": str(error)}
