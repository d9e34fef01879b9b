"""Law 1, absent gradients. A parameter that has no gradient on any rank does not change.

Its optimizer state does not change either: no moment, no weight decay and no count of steps, except
a count that the library keeps once for all parameters. This holds from the first update on. If only
some ranks have a gradient, the missing ones count as zero. A driver that cannot do one of these
refuses it, and names the parameters. A driver may exclude gradients that only some ranks have
(`Capabilities.uneven_gradients`). Such a run ends by an error that names the layers that each rank
used.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ..kernel.errors import RecipeError
from .bench import Bench
from .cases import Refused, check
from .harness import WorkerFailure
from .jobs import accumulate, microbatches
from .judge import require, require_same_bits
from .law_7_capabilities import world_of
from .oracle import batch_of
from .problems import PROBLEMS, inside
from .refusal import problem_for
from .state import assemble, pieces
from .subject import Subject

USERS: Mapping[str, Callable[[int], int | None]] = {
    "none": lambda feeder: None,
    "one": lambda feeder: None if feeder else 0,
    "all": lambda feeder: 0,
    "each": lambda feeder: feeder % 2,
}
"""Index of the spare part that a feeder uses in an update, or None, by kind of update."""

MIXED_UP = "an update was made of what ranks had mixed up"

ROWS = 4
"""Samples of a reader in each update, in two microbatches."""


@check(microbatch=(0, 1))
def what_has_no_gradient_anywhere_is_left(subject: Subject, microbatch: int) -> Refused | None:
    """Require that a spare part without a gradient keeps its weights and state. One microbatch of
    the second update uses it, the first and the third update do not. The decay is a part of the
    gradient, and so of the moments.
    """
    how: dict[str, Any] = {"updates": ("none", "all", "none"), "microbatch": microbatch}
    problem = problem_for(subject, "regression")
    ranks = subject.run(train, problem=problem, optimizer="Adam", **how)
    if refused := refusal(ranks):
        return refused
    states = [assemble(parts) for parts in zip(*(rank["states"] for rank in ranks), strict=True)]
    shared = set() if subject.can("uneven_gradients") else counted_for_all(states[3]["optimizer"])
    weights, moments = (
        [
            {
                name: tensor
                for name, tensor in state[kind].items()
                if name.startswith("spare.") and name.rpartition("/")[2] not in shared
            }
            for state in states
        ]
        for kind in ("weights", "optimizer")
    )
    for before in (0, 2):
        what = "weights of what had no gradient on any rank"
        require_same_bits(what, weights[before + 1], weights[before])
    require_same_bits("optimizer of what had no gradient on any rank", moments[3], moments[2])
    moved = [name for name, tensor in moments[1].items() if bool(tensor.count_nonzero())]
    require(not moved, f"moments of what never had a gradient on any rank moved: {moved}")
    return None


def counted_for_all(state: Mapping[str, Tensor]) -> set[str]:
    """Keys of numbers that are the same for all parameters, which a library may keep once."""
    values: dict[str, set[float]] = {}
    for name, tensor in state.items():
        if not tensor.dim():
            values.setdefault(name.rpartition("/")[2], set()).add(float(tensor))
    return {key for key, found in values.items() if len(found) == 1}


@check(microbatch=(0, 1))
def what_has_none_on_some_ranks_counts_as_zero(subject: Subject, microbatch: int) -> Refused | None:
    """Compare with plain PyTorch, which sees the batches of all ranks in one process. It cannot
    show what feeders that share the batch of a reader use.
    """
    world = subject.run(world_of)[0]
    if not subject.can("uneven_gradients") or world["readers"] != world["feeders"]:
        return None
    updates = ("all", "none", "one", "each", "all")
    problem = problem_for(subject, "regression")
    ranks = subject.run(train, problem=problem, updates=updates, microbatch=microbatch)
    if refused := refusal(ranks):
        return refused
    require_plain_torch(problem, ranks, updates, microbatch, "where ranks had no gradient")
    return None


@check(microbatch=(0, 1))
def gradients_of_earlier_updates_are_forgotten(subject: Subject, microbatch: int) -> Refused | None:
    """Compare with plain PyTorch, where a gradient is added to none of an earlier update, in
    whichever microbatch it comes first.
    """
    updates = ("all", "all", "none", "all")
    problem = problem_for(subject, "regression")
    ranks = subject.run(train, problem=problem, updates=updates, microbatch=microbatch)
    if refused := refusal(ranks):
        return refused
    require_plain_torch(problem, ranks, updates, microbatch, "after an update that used it")
    return None


@check(used=("each", "one"))
def ranks_that_use_other_layers_end_by_name(subject: Subject, used: str) -> Refused | None:
    """Require, of a driver without `uneven_gradients`, that the first update with different layers
    ends the run by an error that names them. "each": ranks use different layers of equal size,
    which hides the difference from collectives. "one": one rank uses a layer more.
    """
    alone = subject.run(world_of)[0]["feeders"] == 1
    if subject.can("uneven_gradients") or alone:
        return None
    problem, reported = problem_for(subject, "regression"), ""
    try:
        subject.run(train_to_the_end, alone=True, problem=problem, updates=[used], microbatch=1)
    except WorkerFailure as failure:
        reported = str(failure)
    require(bool(reported), "ranks that used different layers continued as if they had not")
    require(MIXED_UP not in reported, f"{MIXED_UP}: {reported}")
    require("no answer" not in reported, f"ranks that used different layers hung: {reported}")
    named = [line for line in reported.splitlines() if re.search(r"Error|Failed|Refused", line)]
    named = [line for line in named if "different layers" in line and "spare." in line]
    require(bool(named), f"no error names the layers that some ranks alone used: {reported}")
    return Refused(named[0])


def refusal(ranks: Sequence[Mapping[str, Any]]) -> Refused | None:
    """Return the refusal, if any; it must name the parameters."""
    reported = [rank["refused"] for rank in ranks if rank["refused"]]
    for words in reported:
        require(
            bool(
                re.search(r"spare\.\d\.0\.weight", words)
                and re.search(r"spare\.\d\.0\.bias", words)
            ),
            f"refused without their names: {words!r}",
        )
    return Refused(reported[0]) if reported else None


def require_plain_torch(
    problem: str,
    ranks: Sequence[Mapping[str, Any]],
    updates: Sequence[str],
    microbatch: int,
    where: str,
) -> None:
    """Require the last weights to be those of the same updates by hand."""
    weights = [
        assemble(parts)["weights"] for parts in zip(*(r["states"] for r in ranks), strict=True)
    ]
    expected = in_plain_torch(problem, weights[0], ranks[0]["readers"], updates, microbatch)
    for name, tensor in expected.items():
        off = float((weights[-1][name].double() - tensor).norm() / tensor.norm())
        require(off < 1e-6, f"{name}: off by {off:.2g} of its length {where}")


def in_plain_torch(
    problem: str,
    weights: Mapping[str, Tensor],
    readers: int,
    updates: Sequence[str],
    microbatch: int,
) -> dict[str, Tensor]:
    """Train by hand; return the weights at the end, in float64."""
    whole = model(problem, updates, microbatch, range(readers))
    whole.double().load_state_dict(weights)
    optimizer = decaying(whole.named_parameters())
    for step in range(len(updates)):
        total = torch.zeros((), dtype=torch.float64)
        for reader in range(readers):
            whole.turn = 2 * (reader * len(updates) + step)
            for part in parts_of(step, reader, readers):
                total = total + PROBLEMS[problem].loss(whole, batch_of(problem, part))
        optimizer.zero_grad()
        (total / (ROWS * readers)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {name: tensor.detach() for name, tensor in whole.named_parameters()}


class WithSparePart(nn.Module):
    """A model with one or two spare parts. `plan`: index of the one that each forward uses, or
    None.
    """

    def __init__(self, used: nn.Module, plan: Sequence[int | None], spare: int) -> None:
        super().__init__()
        self.used = used
        self.spare = nn.ModuleList(nn.Sequential(nn.Linear(6, 3)) for _ in range(spare))
        self.plan, self.turn = plan, 0

    def forward(self, x: Tensor) -> Any:
        if not self.training:  # a driver may look at the loss before it trains
            return self.used(x)
        chosen, self.turn = self.plan[self.turn], self.turn + 1
        return self.used(x) if chosen is None else self.used(x) + self.spare[chosen](x)


def model(
    problem: str, updates: Sequence[str], microbatch: int, feeders: Sequence[int]
) -> WithSparePart:
    """The model whose forwards are those of these feeders, one feeder after the other."""
    used = list(chain(*(plan(feeder, updates, microbatch) for feeder in feeders)))
    return WithSparePart(PROBLEMS[problem].model(), used, 2 if "each" in updates else 1)


def plan(feeder: int, updates: Sequence[str], microbatch: int) -> list[int | None]:
    """Spare part, or None, for each microbatch of each update of a feeder."""
    return [
        USERS[update](feeder) if index == microbatch else None
        for update in updates
        for index in range(2)
    ]


def parts_of(step: int, reader: int, readers: int) -> list[list[int]]:
    start = (step * readers + reader) * ROWS
    middle = start + ROWS // 2
    return [list(range(start, middle)), list(range(middle, start + ROWS))]


def decaying(named: Any) -> torch.optim.Optimizer:
    parameters = [parameter for _, parameter in named]
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=0.1)


def decaying_adam(kind: str, named: Any) -> torch.optim.Optimizer:
    parameters = [parameter for _, parameter in named]
    built: torch.optim.Optimizer = getattr(torch.optim, kind)(parameters, lr=0.02, weight_decay=0.1)
    return built


def train_to_the_end(bench: Bench, **arguments: Any) -> None:
    """Job that calls `train`, and ends the process by an error as a run does."""
    try:
        train(bench, patient=False, stall_seconds=10.0, **arguments)
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def train(
    bench: Bench,
    *,
    updates: list[str],
    microbatch: int,
    problem: str = "regression",
    optimizer: str = "SGD",
    patient: bool = True,
    **settings: Any,
) -> dict[str, Any]:
    """Job that returns the state before and after each update, or the words of a refusal. Unless
    `patient`, a refusal is raised.
    """
    build = decaying if optimizer == "SGD" else partial(decaying_adam, optimizer)
    with bench.open(**settings) as session:
        world, used = session.world, PROBLEMS[problem]
        chosen = replace(
            used,
            model=lambda: model(problem, updates, microbatch, [world.feeder_index]),
            parallel=inside("used", used.parallel),
        )
        engine = session.prepare(chosen.recipe(optimizer=build))
        engine.module.train()
        states = [pieces(engine)]
        planned = [
            [(part, True) for part in parts_of(step, world.reader_index, world.num_readers)]
            for step in range(len(updates))
        ]
        batches = session.feed(microbatches(chosen, planned))
        try:
            for update, parts in zip(updates, planned, strict=True):
                accumulate(session, engine, chosen, batches, parts)
                engine.update()
                require(patient or update in ("all", "none"), MIXED_UP)
                states.append(pieces(engine))
        except RecipeError as error:
            if not patient:
                raise
            return {"refused": str(error)}
        return {"refused": "", "states": states, "readers": world.num_readers}
