"""A session of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from ...data.random_state import seed_generators
from ...kernel.contract import Engine, World
from ...kernel.plan import Plan
from ...kernel.recipe import Batch, Recipe
from . import random_state


class SingleProcess:
    """The communication of a session of one process: every sum over ranks is the value itself."""

    def tally(self, values: Sequence[float]) -> Callable[[], list[float]]:
        return lambda: list(values)

    def exchange(self, value: Any) -> list[Any]:
        return [value]

    def reduce(self, tensor: Tensor, op: Literal["sum", "max", "min"] = "sum") -> Tensor:
        return tensor.detach().clone()

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to("cpu", copy=True)


class HostSession(SingleProcess):
    """A session on the CPU, with all of its threads; `build` makes the driver's engine."""

    def __init__(
        self,
        plan: Plan,
        build: Callable[[Recipe, Plan, World], Engine],
        world: World | None = None,
    ) -> None:
        self.plan, self._build = plan, build
        self.world = world or World(0, 1, torch.device("cpu"), feeder_index=0, num_feeders=1)

    def seed(self, value: int) -> None:
        seed_generators(value, devices=True)

    def prepare(self, recipe: Recipe) -> Engine:
        return self._build(recipe, self.plan, self.world)

    def feed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        return batches

    def rng_state(self) -> dict[str, Tensor]:
        return random_state.rng_state(self.world.device)

    def set_rng_state(self, state: Mapping[str, Tensor]) -> None:
        random_state.set_rng_state(self.world.device, state)


@contextmanager
def threads_of_one_operation(number: int | None) -> Iterator[None]:
    """Within the block operations use that many threads; None: torch's default."""
    before = torch.get_num_threads()
    if number is not None:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
