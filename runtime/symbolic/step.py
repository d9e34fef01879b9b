"""Runs a driver's own preparation and step without their memory, to learn what they would take."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from ..checkpoint.gc_paused import gc_paused
from ..data.nested import map_tensors, tensors_of
from ..data.parallel import Parallel
from ..kernel.contract import Driver, Engine, Session, World
from ..kernel.errors import DrivetrainError, SettingError
from ..kernel.optional import AveragesWeights
from ..kernel.plan import Plan
from ..kernel.recipe import Batch, Recipe
from ..kernel.step import Stepper, StepPlace
from ..trainer.gc_frozen import survivors_frozen
from ..trainer.loss_parts import with_parts
from ..trainer.settings import Settings
from .equal_blocks import SHORT, EqualBlocks
from .fake_world import fake_tensors, fake_world, undisturbed
from .live_bytes import LiveBytes
from .trace import Message, Operation, Summary, Trace, with_more_blocks
from .work import Work

__all__ = ["KINDS", "STATE", "NotSymbolic", "SymbolicStep", "symbolic_step"]

KINDS = (
    *("weights", "frozen", "buffers", "gradients", "optimizer", "activations"),
    *("communication", "temporary"),
)
"""The kinds of memory. `communication`: gathered weights, and buffers of what is sent. `temporary`:
results that nothing keeps."""
STATE = ("weights", "frozen", "buffers", "optimizer")
"""The kinds that stay from step to step."""

FORWARD, _BACKWARD, UPDATE = "forward", "backward", "update"
_UNTRACKED_STEPS = 2
"""The first makes the optimizer's state, and some buffers of drivers live from the second on."""


class NotSymbolic(Exception):
    """The step cannot be run without memory."""


@dataclass(frozen=True)
class SymbolicStep:
    """Memory and work of rank 0 for one update."""

    bytes: Mapping[str, int]
    """Bytes at the fullest moment in the memory of the rank's device, by kind (see `KINDS`)."""
    num_microbatches: int
    """The number of microbatches of one reader."""
    samples_of_reader: int
    """At most so many samples of a global batch are one reader's."""
    operations: Sequence[Operation]
    """The work of an update with two microbatches, or one if there is only one. See `FORWARD`."""
    messages: Sequence[Message]


def symbolic_step(
    recipe: Recipe,
    driver: Driver,
    plan: Plan,
    settings: Settings,
    num_ranks: int,
    batch_of: Callable[[int], Batch],
    blocks: EqualBlocks | None = None,
) -> SymbolicStep:
    """Return what rank 0 needs for a step.

    The driver prepares the recipe and makes a few updates, the last of which has at most two
    microbatches, as if there were `num_ranks` ranks; nothing is compiled. Bytes are those of
    tensors, without what an allocator adds. `batch_of(n)`: the first microbatch of one of n
    readers.

    `blocks`: see `find_equal_blocks`. If the driver promises `Capabilities.even_blocks`, it
    prepares two models with a few of them, in place of the whole one, and one of their blocks
    stands for those that are left out. If the two steps do not differ by one block alone, or
    cannot be run, or if settings name single blocks, the whole model is run.

    Raises `SettingError` for options that do not fit that number of ranks, and `NotSymbolic` for
    all else that keeps the step from running, with the reason.
    """
    if not dist.is_available():
        raise NotSymbolic("this build of torch has no torch.distributed")
    if dist.is_initialized():
        raise NotSymbolic("this process has joined a process group")
    # the other ranks do not exist: nobody watches them
    plan = dataclasses.replace(plan, stall_seconds=None, compile=False)
    batch_of = cache(batch_of)

    def run(recipe: Recipe) -> _Traced:
        with undisturbed(), fake_world(num_ranks), driver.open(plan) as session:
            step = _Run(recipe, plan, settings, session)
            return step.run(batch_of(session.world.num_readers))

    try:
        if (
            blocks is not None
            and driver.capabilities(plan).even_blocks
            and blocks.are_named_alike(plan, settings.optimizer, recipe.parallel)
            and (found := _of_blocks(blocks, run)) is not None
        ):
            return found
        whole = run(recipe)
        return whole.step(whole.trace.summary())
    except SettingError:
        raise
    except Exception as error:
        first, *_ = str(error).strip().splitlines() or [""]
        kind = "" if isinstance(error, DrivetrainError) else f"{type(error).__name__}: "
        raise NotSymbolic(kind + first) from error


def _of_blocks(blocks: EqualBlocks, run: Callable[[Recipe], _Traced]) -> SymbolicStep | None:
    """Return the step of the whole model, from those of two with fewer blocks."""
    try:
        shorter, longer = (run(blocks.shortened(depth)) for depth in SHORT)
    except Exception:  # the whole model is to say why it cannot be run
        return None
    found = with_more_blocks(shorter.trace, longer.trace, blocks.depth - SHORT[0])
    return found and shorter.step(found)


@dataclass(frozen=True)
class _Traced:
    """The last steps of a run."""

    trace: Trace
    num_microbatches: int
    samples_of_reader: int

    def step(self, found: Summary) -> SymbolicStep:
        """Return the step with this memory and work."""
        operations = [each for each in found.work if isinstance(each, Operation)]
        messages = [each for each in found.work if isinstance(each, Message)]
        return SymbolicStep(
            found.bytes, self.num_microbatches, self.samples_of_reader, operations, messages
        )


class _Run:
    """Steps of one rank."""

    def __init__(self, recipe: Recipe, plan: Plan, settings: Settings, session: Session) -> None:
        self.plan, self.settings, self.session = plan, settings, session
        self.work = Work()
        self.live = LiveBytes(session.world.device.type, self.work.of)
        self._build = recipe.optimizer or settings.optimizer.build
        self._optimizers: list[torch.optim.Optimizer] = []
        # there are no numbers that could be compared
        parallel = dataclasses.replace(recipe.parallel or Parallel(), compare=False)
        self.recipe = dataclasses.replace(
            with_parts(recipe), optimizer=self._optimizer, parallel=parallel
        )

    def _optimizer(self, named: Iterable[tuple[str, Any]]) -> torch.optim.Optimizer:
        self._optimizers.append(self._build(named))
        return self._optimizers[-1]

    def run(self, batch: Batch) -> _Traced:
        """Return the last of these steps. `batch`: a microbatch."""
        live, work, world = self.live, self.work, self.session.world
        num_turns = len(getattr(self.recipe.loss, "order", [None]))  # of `Turns`
        untracked = max(_UNTRACKED_STEPS, num_turns)
        # all ranks answer what this one does
        exchanging = patch.object(self.session, "exchange", lambda value: [value] * world.size)
        with survivors_frozen(), gc_paused(), fake_tensors() as mode, exchanging, live:
            engine = self.session.prepare(self.recipe)
            engine.module.train()
            stepper = _PhasedStepper(self.recipe, engine, self.session, live)
            part = -(-self.settings.global_batch // world.num_readers)
            num_microbatches = -(-part // (self.plan.micro_batch or part))
            for step in range(1, untracked + num_turns + 1):
                count = min(2, num_microbatches) if step > untracked else 1
                if step == untracked + 1:
                    self._name_what_stays(engine)
                    live.start()
                gc.collect()
                live.phase, work.counts = FORWARD, step == untracked + num_turns
                result = stepper(
                    self._feed(batch, count, mode),
                    count,
                    1.0,
                    lambda: self._before_update(engine),
                    (),
                    StepPlace(step),
                )
                if not result.outcome.applied():
                    raise NotSymbolic("the driver has skipped the update")
                if self.settings.average.decay is not None and isinstance(engine, AveragesWeights):
                    engine.average(1.0)
        return _Traced(live.trace(KINDS), num_microbatches, part)

    def _feed(self, batch: Batch, count: int, mode: Any) -> Iterator[tuple[Batch, float]]:
        """Yield copies of a microbatch without elements, and their weights."""
        copies = (
            map_tensors(lambda tensor: mode.from_tensor(tensor).clone(), batch)
            for _ in range(count)
        )
        for index, each in enumerate(self.session.feed(copies)):
            self.work.is_last = index == count - 1
            yield each, 1.0

    def _before_update(self, engine: Engine) -> None:
        weights = engine.module.parameters()
        self.live.name("gradients", (each.grad for each in weights if each.grad is not None))
        self.live.phase = UPDATE

    def _name_what_stays(self, engine: Engine) -> None:
        """Name the memory that lives from step to step."""
        weights = [*engine.module.parameters()]
        self.live.name("weights", (each for each in weights if each.requires_grad))
        self.live.name("frozen", (each for each in weights if not each.requires_grad))
        self.live.name("buffers", engine.module.buffers())
        for optimizer in self._optimizers:
            masters = (each for group in optimizer.param_groups for each in group["params"])
            self.live.name("optimizer", masters)
            self.live.name("optimizer", tensors_of([*optimizer.state.values()]))


class _PhasedStepper(Stepper):
    """A `Stepper` that says what it does."""

    def __init__(self, recipe: Recipe, engine: Engine, session: Session, live: LiveBytes) -> None:
        agreeing: Any = _Agreeing(session.world)
        super().__init__(recipe, engine, agreeing)
        self.live = live

    def backward(self, loss: Tensor, weight: float) -> Tensor:
        self.live.name_kept("activations", FORWARD)
        self.live.phase = _BACKWARD
        value = super().backward(loss, weight)
        self.live.phase = FORWARD
        return value


class _Agreeing:
    """The part of a session that a step uses, of ranks that all have the same numbers."""

    def __init__(self, world: World) -> None:
        self.world = world

    def tally(self, values: Sequence[float]) -> Callable[[], list[float]]:
        """See `Session`."""
        return lambda: [value * self.world.size for value in values]
