"""Law 1, absent gradients. A parameter that no rank has a gradient of is left as it is, and so is
its state in the optimizer: no moment moves, no weight decays, no count of steps goes on, but one
that the library keeps once for all parameters. Where some ranks have a gradient and others have
none, that of the others counts as zero. A driver that cannot do either refuses it, and names the
parameters; that ranks differ it may exclude (`Capabilities.uneven_gradients`), and ends the run
then, by an error that names what they used.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
"""Which of the spare parts, if any, a feeder uses in an update."""

MIXED_UP = "an update was made of what ranks had mixed up"

ROWS = 4
"""Samples of a reader in each update, in two microbatches."""


@check(microbatch=(0, 1))
def what_has_no_gradient_anywhere_is_left(subject: Subject, microbatch: int) -> Refused | None:
    """It is used in one of two microbatches of the first update, and in none of the second."""
    how: dict[str, Any] = {"updates": ("all", "none"), "microbatch": microbatch}
    problem = problem_for(subject, "regression")
    ranks = subject.run(train, problem=problem, optimizer="AdamW", **how)
    if refused := refusal(ranks):
        return refused
    states = [assemble(parts) for parts in zip(*(rank["states"] for rank in ranks), strict=True)]
    shared = set() if subject.can("uneven_gradients") else counted_for_all(states[2]["optimizer"])
    for kind in ("weights", "optimizer"):
        before, after = (
            {
                name: tensor
                for name, tensor in state[kind].items()
                if name.startswith("spare.") and name.rpartition("/")[2] not in shared
            }
            for state in states[1:]
        )
        require_same_bits(f"{kind} of what had no gradient on any rank", after, before)
    return None


def counted_for_all(state: Mapping[str, Tensor]) -> set[str]:
    """The keys of numbers that are the same for all parameters, which a library may keep once."""
    values: dict[str, set[float]] = {}
    for name, tensor in state.items():
        if not tensor.dim():
            values.setdefault(name.rpartition("/")[2], set()).add(float(tensor))
    return {key for key, found in values.items() if len(found) == 1}


@check(microbatch=(0, 1))
def what_has_none_on_some_ranks_counts_as_zero(subject: Subject, microbatch: int) -> Refused | None:
    """Beside plain PyTorch, where the batches of all ranks are in one process."""
    if not subject.can("uneven_gradients"):
        return None
    updates = ("all", "none", "one", "each", "all")
    problem = problem_for(subject, "regression")
    ranks = subject.run(train, problem=problem, updates=updates, microbatch=microbatch)
    if refused := refusal(ranks):
        return refused
    weights = [
        assemble(parts)["weights"] for parts in zip(*(r["states"] for r in ranks), strict=True)
    ]
    expected = in_plain_torch(problem, weights[0], ranks[0]["feeders"], updates, microbatch)
    for name, tensor in expected.items():
        off = float((weights[-1][name].double() - tensor).norm() / tensor.norm())
        require(off < 1e-6, f"{name}: off by {off:.2g} of its length where ranks had no gradient")
    return None


@check(used=("each", "one"))
def ranks_that_use_other_layers_end_by_name(subject: Subject, used: str) -> Refused | None:
    """Where that is not declared, in the first such update, and what all leave behind names the
    layers: where these are as large as each other, so that all that ranks tell each other fits, and
    where one rank uses a layer more."""
    alone = subject.run(world_of)[0]["feeders"] == 1
    if subject.can("uneven_gradients") or alone:
        return None
    problem, told = problem_for(subject, "regression"), ""
    try:
        subject.run(train_to_the_end, alone=True, problem=problem, updates=[used], microbatch=1)
    except WorkerFailure as failure:
        told = str(failure)
    require(bool(told), "ranks that used different layers went on as if they had not")
    require(MIXED_UP not in told, f"{MIXED_UP}: {told}")
    require("no answer" not in told, f"ranks that used different layers hung: {told}")
    named = [line for line in told.splitlines() if re.search(r"Error|Failed|Refused", line)]
    named = [line for line in named if "different layers" in line and "spare." in line]
    require(bool(named), f"no error names the layers that some ranks alone used: {told}")
    return Refused(named[0])


def refusal(ranks: Sequence[Mapping[str, Any]]) -> Refused | None:
    """What all said, with the names of the parameters."""
    told = [rank["refused"] for rank in ranks if rank["refused"]]
    for words in told:
        require(
            bool(
                re.search(r"spare\.\d\.0\.weight", words)
                and re.search(r"spare\.\d\.0\.bias", words)
            ),
            f"refused without their names: {words!r}",
        )
    return Refused(told[0]) if told else None


def in_plain_torch(
    problem: str,
    weights: Mapping[str, Tensor],
    feeders: int,
    updates: Sequence[str],
    microbatch: int,
) -> dict[str, Tensor]:
    """The weights at the end, in float64."""
    whole = model(problem, updates, microbatch, range(feeders))
    whole.double().load_state_dict(weights)
    optimizer = decaying(whole.named_parameters())
    for step in range(len(updates)):
        total = torch.zeros((), dtype=torch.float64)
        for feeder in range(feeders):
            whole.turn = 2 * (feeder * len(updates) + step)
            for part in parts_of(step, feeder, feeders):
                total = total + PROBLEMS[problem].loss(whole, batch_of(problem, part))
        optimizer.zero_grad()
        (total / (ROWS * feeders)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {name: tensor.detach() for name, tensor in whole.named_parameters()}


class WithSparePart(nn.Module):
    """`plan`: which of its spare parts each forward uses; there are two if any uses the second."""

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
    """For these feeders, one after the other."""
    used = list(chain(*(plan(feeder, updates, microbatch) for feeder in feeders)))
    return WithSparePart(PROBLEMS[problem].model(), used, 2 if "each" in updates else 1)


def plan(feeder: int, updates: Sequence[str], microbatch: int) -> list[int | None]:
    """For each microbatch of each update of a feeder."""
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


def decaying_adam(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for _, parameter in named], lr=0.02, weight_decay=0.1)


def train_to_the_end(bench: Bench, **arguments: Any) -> None:
    """A job: the same, where an error ends the process, as it does that of a run."""
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
    """A job: the state before and after each update, or how one was refused; unless `patient`, that
    is an error."""
    build = decaying_adam if optimizer == "AdamW" else decaying
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
        dealt = [
            [(part, True) for part in parts_of(step, world.reader_index, world.num_readers)]
            for step in range(len(updates))
        ]
        batches = session.feed(microbatches(chosen, dealt))
        try:
            for update, parts in zip(updates, dealt, strict=True):
                accumulate(session, engine, chosen, batches, parts)
                engine.update()
                require(patient or update in ("all", "none"), MIXED_UP)
                states.append(pieces(engine))
        except RecipeError as error:
            if not patient:
                raise
            return {"refused": str(error)}
        return {"refused": "", "states": states, "feeders": world.num_feeders}
