"""Each part that several ranks hold is counted by one of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from drivetrain.kernel.plan import World
from drivetrain.trainer.shown_updates import CountedParts


def counted(by_rank: list[dict[str, tuple[int, str]]]) -> list[frozenset[str]]:
    """Return what each rank counts of the parts that it holds: number of elements, and key."""
    parts = [
        {name: (torch.zeros(count), key) for name, (count, key) in held.items()} for held in by_rank
    ]
    sent: list[Any] = []

    def ask(rank: int, exchange: Any) -> CountedParts:
        world = World(rank, len(parts), torch.device("cpu"), 0, 1)
        session: Any = SimpleNamespace(world=world, exchange=exchange)
        chosen = CountedParts(session)
        chosen.choose(parts[rank])
        return chosen

    def collect(held: Any) -> Any:
        sent.append(held)
        return [held] * len(parts)

    for rank in range(len(parts)):
        ask(rank, collect)
    return [ask(rank, lambda held: sent).own for rank in range(len(parts))]


def test_ranks_share_out_the_elements_evenly() -> None:
    """Weights and biases take turns in a model: one rank would have all weights."""
    layers = {f"{i}.{kind}": (size, "whole") for i in range(8) for kind, size in
              (("weight", 4096), ("bias", 64))}  # fmt: skip
    own = counted([layers, layers])
    assert own[0] | own[1] == set(layers)
    assert not own[0] & own[1]
    elements = [sum(layers[name][0] for name in names) for names in own]
    assert elements[0] == elements[1]


def test_each_part_is_counted_by_one_rank_that_holds_it() -> None:
    own = counted(
        [
            {"sharded": (5, "rows 0 to 5"), "whole": (7, "whole"), "small": (3, "whole")},
            {"sharded": (4, "rows 5 to 9"), "whole": (7, "whole"), "small": (0, "nothing")},
        ]
    )
    assert "sharded" in own[0] & own[1]
    assert ("whole" in own[0]) + ("whole" in own[1]) == 1
    assert "small" in own[0] - own[1]
