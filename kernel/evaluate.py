"""Evaluation: streaming, exact, in constant memory.

Each sample is measured once, by one reader; what is measured are sums, so adding batches and ranks
up is exact for any remainder and any world size (law 5). Nothing of training changes: modes,
random state and gradients are as before."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from itertools import chain

import torch
from torch import Tensor, nn

from .batches import Group, items_of
from .contract import Engine, Session
from .errors import RecipeError
from .recipe import Batch, Recipe

__all__ = ["evaluate", "evaluation_mode", "summarise"]

_SEED = 0x5EED  # evaluation draws the same random numbers each time, and none of training's


def evaluate(
    session: Session, engine: Engine, recipe: Recipe, groups: Generator[Group, None, None]
) -> dict[str, float]:
    """Metrics over all readers' `groups`; called by all ranks, with equal results on all.

    The sums are float64. Raises `RecipeError` when `measure` returns what cannot be added up."""
    measure = recipe.measure or (lambda module, batch: {"loss": recipe.loss(module, batch)})
    of_mean = recipe.measure is None and recipe.loss_is == "mean"
    counts: deque[tuple[int, float, int]] = deque()
    sums: dict[str, Tensor] = {}
    items, samples = 0.0, 0
    with evaluation_mode(session, engine.module), torch.no_grad(), closing(groups):
        for batch in session.feed(_counted(groups, recipe, counts)):
            with engine.autocast():
                measured = measure(engine.module, batch)
            batch_samples, batch_items, repeats = counts.popleft()
            samples += batch_samples
            items += batch_items
            for name, value in _checked(measured).items():
                # an idle batch is measured to stay in step with other ranks, and not counted
                counted = batch_samples and session.world.is_first_of_reader
                part = session.world.widened(value if counted else torch.zeros_like(value))
                if of_mean:
                    part = part * batch_items
                elif repeats > 1:
                    part = part / repeats
                sums[name] = sums[name] + part if name in sums else part
        sums = {name: session.reduce(value) for name, value in sums.items()}
    weight = session.world.replicated_sum_weight
    totals = [total * weight for total in session.tally((items, samples))()]
    sums |= {"items": torch.tensor(totals[0]).double(), "samples": torch.tensor(totals[1]).double()}
    return summarise(recipe, {name: value.cpu() for name, value in sums.items()})


def _counted(
    groups: Iterable[Group], recipe: Recipe, counts: deque[tuple[int, float, int]]
) -> Iterator[Batch]:
    for batch in chain.from_iterable(group.microbatches for group in groups):
        items = items_of(batch, recipe.count_items)
        counts.append((batch.num_samples, items, batch.repeats))
        yield batch.batch


def _checked(measured: object) -> Mapping[str, Tensor]:
    if not isinstance(measured, Mapping) or not all(
        isinstance(value, Tensor) for value in measured.values()
    ):
        raise RecipeError(
            f"recipe.measure returned {measured!r}; it must return a dict of tensors, each a sum "
            "over the batch"
        )
    return measured


def summarise(recipe: Recipe, sums: Mapping[str, Tensor]) -> dict[str, float]:
    """The metrics of the sums over the whole data, which have "items" and "samples"."""
    if recipe.summarise is not None:
        return {name: float(value) for name, value in recipe.summarise(sums).items()}
    items = float(sums["items"])
    return {
        name: float(value) / items if items else float("nan")
        for name, value in sums.items()
        if name not in ("items", "samples") and value.dim() == 0
    }


@contextmanager
def evaluation_mode(session: Session, module: nn.Module) -> Iterator[None]:
    """Evaluation mode and random state of its own; everything as before afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    random_state = session.rng_state()
    module.eval()
    session.seed(_SEED)
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
        session.set_rng_state(random_state)
