"""Training against the contract alone, in the ranks: no loop, loader or checkpoint of the kernel.

What a job takes and returns is JSON, tensors aside.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..kernel.contract import Engine, Session
from ..kernel.optional import TakesOverStep
from ..kernel.recipe import Microstep
from .bench import Bench
from .optimizers import optimizer_class
from .problems import PROBLEMS, Problem, Sample
from .state import pieces, whole_weights

__all__ = ["ReaderBatches", "optimizer_called", "partition", "train"]

ReaderBatches = list[tuple[list[int], bool]]
"""Sample indices of each microbatch, and whether they count."""


def train(
    bench: Bench,
    *,
    problem: str,
    groups: Sequence[Sequence[int]],
    rates: Sequence[float],
    optimizer: str,
    micro_batch: int | None = None,
    spoil: dict[str, Any] | None = None,
    silent: Sequence[int] = (),
    left_out: int = 0,
    watch: Sequence[int] = (),
    whole: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Job that does one update on each group of samples. `spoil`: a factor for the loss of one
    microbatch of one feeder in one step. `silent`: steps whose losses are multiplied by zero.
    `left_out`: number of parameters, the last ones, that the optimizer is not given. `watch`: steps
    after which the state is kept. `whole`: return the whole weights of each rank, too.
    """
    chosen = PROBLEMS[problem]
    with bench.open(**settings) as session:
        engine = session.prepare(chosen.recipe(optimizer=optimizer_called(optimizer, left_out)))
        states = {"initial": pieces(engine)}
        engine.module.train()
        reader, readers = session.world.reader_index, session.world.num_readers
        planned = [partition(group, reader, readers, micro_batch) for group in groups]
        batches = session.feed(microbatches(chosen, planned))
        losses, outcomes = [], []
        for step, (parts, rate) in enumerate(zip(planned, rates, strict=True)):
            factors = [0.0 if step in silent else 1.0 for _ in parts]
            if spoil and (step, reader) == (spoil["step"], spoil["feeder"] % readers):
                factors[spoil["microbatch"]] = spoil["factor"]
            losses.append(accumulate(session, engine, chosen, batches, parts, factors))
            for group in engine.param_groups:
                group["lr"] = rate
            outcomes.append(engine.update())
            if step in watch:
                states[f"after {step}"] = pieces(engine)
        return {
            "losses": losses,
            "norms": [outcome.grad_norm.detach().cpu() for outcome in outcomes],
            # asked late, when other updates are done: each answer is of its own update
            "applied": [bool(outcome.applied()) for outcome in outcomes],
            "states": {**states, "final": pieces(engine)},
            "whole": whole_weights(engine) if whole else {},
        }


def accumulate(
    session: Session,
    engine: Engine,
    problem: Problem,
    batches: Iterator[Sample],
    planned: ReaderBatches,
    factors: Sequence[float] = (),
) -> float:
    """Run forward and backward of one update; return the mean loss an item over the global batch.
    Items are counted in the reader's samples: where several feeders share a reader, a batch may
    hold only a part of them.
    """
    mine = sum(problem.items(problem.batch(part)) for part, counts in planned if counts)
    items = session.tally([mine])()[0] * session.world.replicated_sum_weight
    total = torch.zeros((), device=session.world.device)
    taken = [next(batches) for _ in planned]
    for index, (batch, (_, counts)) in enumerate(zip(taken, planned, strict=True)):
        with engine.microbatch(index == len(planned) - 1):
            factor = (factors[index] if factors else 1.0) if counts else 0.0
            part = Microstep(
                index,
                len(planned),
                session.world.num_feeders,
                lambda: items,
                engine.autocast,
                partial(_backward, engine),
                factor,
            )
            if isinstance(engine, TakesOverStep):
                total += engine.step(engine.module, batch, part) * items / part.num_feeders
                continue
            with engine.autocast():
                loss = problem.loss(engine.module, batch)
            total += part.backward(loss, part.num_feeders / items) * items / part.num_feeders
    return float(session.reduce(total)) / items


def _backward(engine: Engine, loss: Tensor, weight: float) -> Tensor:
    """Add the gradient of `weight * loss`; return it detached."""
    factor = loss.detach().new_full((), weight)
    engine.backward(loss, factor)
    return loss.detach() * factor


def partition(
    group: Sequence[int], reader: int, readers: int, micro_batch: int | None
) -> ReaderBatches:
    """Return a reader's microbatches: contiguous, of nearly equal size, as many on every reader. A
    microbatch that would be empty has one sample, which does not count.
    """
    size = -(-len(group) // readers)
    mine = split(group, readers)[reader]
    parts = split(mine, -(-size // (micro_batch or size)))
    return [(part or [group[0]], bool(part)) for part in parts]


def split(values: Sequence[int], parts: int) -> list[list[int]]:
    size, larger = divmod(len(values), parts)
    ends = [index * size + min(index, larger) for index in range(parts + 1)]
    return [list(values[start:stop]) for start, stop in itertools.pairwise(ends)]


def microbatches(problem: Problem, planned: Sequence[ReaderBatches]) -> Iterator[Sample]:
    return (problem.batch(part) for parts in planned for part, _ in parts)


def optimizer_called(name: str, left_out: int = 0) -> Any:
    """Return a factory of that optimizer class, of torch's or this suite's, without the last
    `left_out` parameters.
    """

    def build(named: Any) -> torch.optim.Optimizer:
        parameters: list[Tensor] = [parameter for _, parameter in named]
        parameters = parameters[: len(parameters) - left_out]
        return optimizer_class(name)(parameters, lr=0.0)  # type: ignore[call-arg]

    return build
