"""Law 7. Where a driver promises `even_blocks`, a few of a model's equal blocks show what a step
with all of them needs."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn

from ..symbolic.equal_blocks import find_equal_blocks
from ..symbolic.step import NotSymbolic, SymbolicStep, symbolic_step
from ..trainer.settings import Settings
from .bench import Bench
from .cases import check
from .judge import require, require_same
from .problems import PROBLEMS
from .refusal import problem_for
from .subject import Subject

DEPTH = 10


@check()
def even_blocks(subject: Subject) -> None:
    """Require the memory, the work and the messages of a step with all blocks, which is run without
    memory, to be those that a few blocks show. A step that cannot be run so shows nothing.
    """
    if not subject.can("even_blocks"):
        return
    problem = problem_for(subject, "language")
    (steps,) = subject.run(all_and_few_blocks, world=1, problem=problem, num_ranks=subject.world)
    if steps is not None:
        require_same("what a few blocks show of a step", steps["few"], steps["all"])


def all_and_few_blocks(
    bench: Bench, *, problem: str, num_ranks: int
) -> dict[str, dict[str, Any]] | None:
    """Job that returns the sums of a step with all blocks, and those that a few blocks show; None
    if the step cannot be run without memory.
    """
    chosen = PROBLEMS[problem]

    def deep() -> nn.Module:
        model: Any = chosen.model()
        while len(model.blocks) < DEPTH:
            model.blocks.extend(chosen.model().blocks)
        deepened: nn.Module = model
        return deepened

    samples = [chosen.draw(index) for index in range(2 * num_ranks)]
    recipe = chosen.recipe(model=deep, train_data=samples)
    settings = Settings(steps=1, global_batch=len(samples), max_grad_norm=None)
    plan = settings.plan(bench.plan().options)
    batch = chosen.batch(range(2))
    blocks = find_equal_blocks(recipe)
    require(blocks is not None, "this problem has no equal blocks")
    try:
        whole, few = (
            symbolic_step(recipe, bench.driver, plan, settings, num_ranks, lambda _: batch, each)
            for each in (None, blocks)
        )
    except NotSymbolic:
        return None
    return {"all": sums(whole), "few": sums(few)}


def sums(step: SymbolicStep) -> dict[str, Any]:
    """Return the memory by kind, FLOPs and bytes by phase, and bytes of messages by name."""
    flops, moved, sent = Counter[str](), Counter[str](), Counter[str]()
    for operation in step.operations:
        flops[operation.phase] += operation.flops
        moved[operation.phase] += operation.num_bytes
    for message in step.messages:
        sent[message.name] += message.num_bytes
    return {"bytes": dict(step.bytes), "flops": flops, "moved": moved, "sent": sent}
