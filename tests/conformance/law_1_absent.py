"""Law 1, absent gradients. A parameter that no rank has a gradient of is left as it is, and so is
its state in the optimizer: no moment moves, no weight decays. Where some ranks have a gradient and
others have none, that of the others counts as zero. A driver that cannot do either refuses it, and
names the parameters; that ranks differ it may exclude (`Capabilities.uneven_gradients`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ..kernel.errors import RecipeError
from .bench import Bench
from .cases import Refused, check
from .jobs import accumulate, microbatches
from .judge import require, require_same_bits
from .oracle import batch_of
from .problems import PROBLEMS
from .state import assemble, pieces
from .subject import Subject

USERS: Mapping[str, Sequence[int] | None] = {"none": (), "one": (0,), "all": None}
"""Which feeders use the spare part in an update; None for all of them."""

ROWS = 4
"""Samples of a feeder in each update, in two microbatches."""


@check(microbatch=(0, 1))
def what_has_no_gradient_anywhere_is_left(subject: Subject, microbatch: int) -> Refused | None:
    """It is used in one of two microbatches of the first update, and in none of the second."""
    ranks = subject.run(train, updates=("all", "none"), microbatch=microbatch)
    if refused := refusal(ranks):
        return refused
    states = [assemble(parts) for parts in zip(*(rank["states"] for rank in ranks), strict=True)]
    for kind in ("weights", "optimizer"):
        before, after = (
            {name: tensor for name, tensor in state[kind].items() if name.startswith("spare.")}
            for state in states[1:]
        )
        require_same_bits(f"{kind} of what had no gradient on any rank", after, before)
    return None


@check(microbatch=(0, 1))
def what_has_none_on_some_ranks_counts_as_zero(subject: Subject, microbatch: int) -> Refused | None:
    """Beside plain PyTorch, where the batches of all ranks are in one process."""
    if not subject.can("uneven_gradients"):
        return None
    updates = ("all", "none", "one", "one", "all")
    ranks = subject.run(train, updates=updates, microbatch=microbatch)
    if refused := refusal(ranks):
        return refused
    weights = [
        assemble(parts)["weights"] for parts in zip(*(r["states"] for r in ranks), strict=True)
    ]
    expected = in_plain_torch(weights[0], ranks[0]["feeders"], updates, microbatch)
    for name, tensor in expected.items():
        off = float((weights[-1][name].double() - tensor).norm() / tensor.norm())
        require(off < 1e-6, f"{name}: off by {off:.2g} of its length where ranks had no gradient")
    return None


def refusal(ranks: Sequence[Mapping[str, Any]]) -> Refused | None:
    """What all said, with the names of the parameters."""
    told = [rank["refused"] for rank in ranks if rank["refused"]]
    for words in told:
        require(
            "spare.weight" in words and "spare.bias" in words,
            f"refused without their names: {words!r}",
        )
    return Refused(told[0]) if told else None


def in_plain_torch(
    weights: Mapping[str, Tensor], feeders: int, updates: Sequence[str], microbatch: int
) -> dict[str, Tensor]:
    """The weights at the end, in float64."""
    plans = [plan(feeder, updates, microbatch) for feeder in range(feeders)]
    model = WithSparePart(list(chain(*plans)))
    model.double().load_state_dict(weights)
    optimizer = decaying(model.named_parameters())
    for step in range(len(updates)):
        total = torch.zeros((), dtype=torch.float64)
        for feeder in range(feeders):
            model.turn = 2 * (feeder * len(updates) + step)
            for part in parts_of(step, feeder, feeders):
                total = total + PROBLEMS["regression"].loss(model, batch_of("regression", part))
        optimizer.zero_grad()
        (total / (ROWS * feeders)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


class WithSparePart(nn.Module):
    """`plan`: whether each forward uses it."""

    def __init__(self, plan: Sequence[bool]) -> None:
        super().__init__()
        self.used, self.spare = PROBLEMS["regression"].model(), nn.Linear(6, 3)
        self.plan, self.turn = plan, 0

    def forward(self, x: Tensor) -> Any:
        uses, self.turn = self.plan[self.turn], self.turn + 1
        return self.used(x) + self.spare(x) if uses else self.used(x)


def plan(feeder: int, updates: Sequence[str], microbatch: int) -> list[bool]:
    """For each microbatch of each update of a feeder."""
    users = [USERS[update] for update in updates]
    return [
        (chosen is None or feeder in chosen) and index == microbatch
        for chosen in users
        for index in range(2)
    ]


def parts_of(step: int, feeder: int, feeders: int) -> list[list[int]]:
    start = (step * feeders + feeder) * ROWS
    middle = start + ROWS // 2
    return [list(range(start, middle)), list(range(middle, start + ROWS))]


def decaying(named: Any) -> torch.optim.Optimizer:
    parameters = [parameter for _, parameter in named]
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=0.1)


def train(bench: Bench, *, updates: list[str], microbatch: int) -> dict[str, Any]:
    """A job: the state before and after each update, or how one was refused."""
    with bench.open() as session:
        feeder, feeders = session.world.feeder_index, session.world.num_feeders
        uses = plan(feeder, updates, microbatch)
        problem = replace(PROBLEMS["regression"], model=lambda: WithSparePart(uses))
        engine = session.prepare(problem.recipe(optimizer=decaying))
        engine.module.train()
        states = [pieces(engine)]
        dealt = [
            [(part, True) for part in parts_of(step, feeder, feeders)]
            for step in range(len(updates))
        ]
        batches = session.feed(microbatches("regression", dealt))
        try:
            for _ in updates:
                accumulate(session, engine, problem, batches, [True, True], [1.0, 1.0])
                engine.update()
                states.append(pieces(engine))
        except RecipeError as error:
            return {"refused": str(error)}
        return {"refused": "", "states": states, "feeders": feeders}
