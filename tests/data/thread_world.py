"""A world of threads: the part of a session that data and predictions need, for any number of
ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from drivetrain.kernel.contract import World

T = TypeVar("T")
LONGEST_WAIT_SECONDS = 10.0
"""Longest wait for a rank that does not arrive."""


@dataclass
class Together:
    """Exchange of values between the threads of one world."""

    size: int
    values: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=LONGEST_WAIT_SECONDS)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait()
        everyone = [self.values[index] for index in range(self.size)]
        self.barrier.wait()
        return everyone


class ThreadSession:
    """Session of one rank of a world of threads."""

    def __init__(self, rank: int = 0, together: Together | None = None) -> None:
        self.together = together or Together(1)
        size = self.together.size
        self.world = World(rank, size, torch.device("cpu"), feeder_index=rank, num_feeders=size)

    def feed(self, batches: Iterator[Any]) -> Iterator[Any]:
        return batches

    def exchange(self, value: Any) -> list[Any]:
        return self.together.exchange(self.world.rank, value)

    def tally(self, values: Sequence[float]) -> Callable[[], list[float]]:
        sums = [sum(each) for each in zip(*self.exchange(values), strict=True)]
        return lambda: sums

    def gather(self, tensor: Tensor) -> Tensor:
        return torch.cat(self.exchange(tensor))

    def seed(self, value: int) -> None: ...

    def rng_state(self) -> dict[str, Tensor]:
        return {}

    def set_rng_state(self, state: dict[str, Tensor]) -> None: ...


def on_ranks(job: Callable[[Any], T], size: int) -> list[Any]:
    """Return the value or the error of the job on each rank of a world of that size."""
    together, results = Together(size), dict[int, Any]()

    def run(rank: int) -> None:
        try:
            results[rank] = job(ThreadSession(rank, together))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[rank] for rank in range(size)]
