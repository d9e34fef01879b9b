"""Names the first tensor of a step that is not finite.

After a step that could not be applied, all ranks run its microbatches once more: the forward of
each, and, if all of these are finite, forward and backward. Nothing of the run changes: weights,
buffers, gradients, the optimizer, random state and the position in the data stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..data.open_dataset import Source
from ..data.prebatched import PrebatchedLoader
from ..data.random_state import host_state, set_host_state
from ..data.user_frames import last_line
from ..kernel.batches import Group, Groups, Microbatch, Position, items_of
from ..kernel.contract import Engine, Session, World
from ..kernel.events import Event, StepSkipped
from ..kernel.optional import RunsBackwardAgain, TakesOverStep
from ..kernel.recipe import Batch, Recipe
from .kept_microbatches import (
    Kept,
    KeptMicrobatches,
    set_torch_random_state,
    torch_random_state,
)
from .loss_parts import LossParts
from .nonfinite_backward import run_backward
from .nonfinite_trace import Trace
from .nonfinite_values import Origin
from .settings import PRECISIONS, Settings
from .step_clock import COMPUTE

__all__ = ["NonFiniteFound", "NonFiniteSearch", "Rerun", "rerun_of"]

_STEPS_BETWEEN = 100
"""Steps after a search before another one, unless the run is about to end."""


@dataclass(frozen=True)
class NonFiniteFound(Event):
    """The first tensor of a step that is not finite; an event. All ranks have equal figures.

    If nothing was found, only `step` and `text` are set.
    """

    step: int
    text: str
    """A sentence with all of it, or the reason why nothing was found."""
    phase: str = ""
    """`forward` or `backward`."""
    values: str = ""
    """`NaN` or `infinity`."""
    module: str = ""
    """FQN of the module; empty for an operation of `recipe.loss`."""
    operation: str = ""
    """The operation, such as `torch.log`."""
    tensor: str = ""
    """The weight, buffer or part of the batch that was not finite before the step; or the weight
    whose gradient is not finite."""
    place: str = ""
    """Line of the user's code: `model.py:41`."""
    rank: int | None = None
    microbatch: int | None = None
    """Number of the microbatch in its step, from 0."""
    sample: int | None = None
    """Number of the first such sample in the microbatch, from 0."""
    data: str = ""
    """Place of the sample in the data."""


@dataclass(frozen=True)
class Rerun:
    """The functions by which the microbatches of a step are run again."""

    loss_of: Callable[[int], Callable[[nn.Module, Batch], Tensor]]
    """Returns the loss function of the step of this number."""
    weight: Callable[[Microbatch, float], float]
    """Returns the factor of a microbatch's loss in its step. Its second argument: the items of the
    global batch."""
    where: Callable[[Position, int], str] | None = None
    """Describes samples by the position of the first one and their number; None: nothing does."""


def rerun_of(recipe: Recipe, world: World, source: Source) -> Rerun | None:
    """Return how steps of a recipe are run again; None for a recipe with a step of its own."""
    if recipe.step is not None and not isinstance(recipe.loss, LossParts):
        return None

    def weight(part: Microbatch, num_items: float) -> float:
        """Return the weight as the kernel's `Stepper` has it."""
        own = 1 / part.repeats if part.num_samples else 0.0
        if recipe.loss_is == "mean" and recipe.step is None:
            own = items_of(part, recipe.count_items)
        return own * world.num_feeders / num_items if num_items else 0.0

    return Rerun(
        loss_of=getattr(recipe.loss, "of_update", lambda number: recipe.loss),
        weight=weight,
        where=None if isinstance(source, PrebatchedLoader) else source.where,  # it counts batches
    )


class NonFiniteSearch:
    """Searches on one rank. All ranks call every method in the same order. `rerun`: None if steps
    cannot be run again."""

    def __init__(
        self, rerun: Rerun | None, session: Session, engine: Engine, settings: Settings
    ) -> None:
        self.rerun, self.session, self.engine, self.settings = rerun, session, engine, settings
        self._kept: KeptMicrobatches | None = None
        self._num_items, self._last = math.nan, -math.inf
        self.watches = (
            settings.find_nonfinite
            and rerun is not None
            and not isinstance(engine, TakesOverStep)
            and _has_generator(session.world.device)
        )

    def watch(self, groups: Groups) -> Groups:
        """Return the same groups, whose microbatches are kept from now on."""
        if not self.watches:
            return groups
        self._kept = KeptMicrobatches(groups, self.session.world.device)
        return self._kept

    def marking(self, mark: Callable[[str], object]) -> Callable[[str], object]:
        """Return `mark` of the loop, which also keeps the random state before each forward."""
        if (kept := self._kept) is None:
            return mark

        def and_keep(part: str) -> None:
            if part == COMPUTE:
                kept.mark()
            mark(part)

        return and_keep

    def ended(self, group: Group, num_items: float) -> None:
        """Note the end of a step. `num_items`: of its global batch."""
        if self._kept is not None:
            self._kept.ended(group)
            self._num_items = num_items

    def find(self, event: StepSkipped, group: Group) -> NonFiniteFound | None:
        """Search the step of `event`; None if it is not to be searched."""
        if not self._is_due(event):
            return None
        assert self._kept is not None and self.rerun is not None
        self._last = event.step
        kept = self._kept.of(group)
        number = min(self.session.exchange(len(kept)))
        with self._unchanged() as names:
            search = _Search(self, self.rerun, event.step, group, names)
            found = search.forward(kept[:number]) or search.backward(kept[:number])
        missing = group.num_microbatches - number
        if found.rank is None and missing:
            text = f"{found.text}; {missing} of its microbatches were too large to be kept"
            found = NonFiniteFound(event.step, text)
        return found

    def _is_due(self, event: StepSkipped) -> bool:
        """True for the first step of a row, but not often; and for the last one that the run
        allows. Loss scaling overflows by design: there, only a loss is searched for."""
        if self._kept is None:
            return False
        if event.step <= self._last:
            self._last = -math.inf  # the run was rolled back
        if self._last > event.step - event.in_a_row:
            return False
        if event.in_a_row >= self.settings.max_nonfinite:
            return True
        scales = PRECISIONS[self.settings.precision].loss_scaling
        if scales and math.isfinite(event.loss):
            return False
        return event.step - self._last >= _STEPS_BETWEEN

    @contextmanager
    def _unchanged(self) -> Iterator[dict[nn.Module, str]]:
        """Restore everything that a forward and a backward may change. Gives the FQNs."""
        module, device = self.engine.module, self.session.world.device
        with self.engine.full_params(()) as own:
            names = {part: name for name, part in own.named_modules()}
        buffers = [
            (part, name, buffer, buffer.detach().clone())
            for part in module.modules()
            for name, buffer in part.named_buffers(recurse=False)
        ]
        learning = [(each, each.requires_grad) for each in module.parameters()]
        modes = [(part, part.training) for part in module.modules()]
        of_host, of_torch = host_state(), torch_random_state(device)
        stance = nullcontext()
        if self.settings.compile:  # the operations of compiled code cannot be seen
            stance = torch.compiler.set_stance("force_eager")
        try:
            with stance, torch.autograd.set_detect_anomaly(False):
                yield names
        finally:
            set_host_state(of_host)
            set_torch_random_state(device, of_torch)
            for part, mode in modes:
                part.training = mode
            with torch.no_grad():
                for part, name, buffer, before in buffers:
                    setattr(part, name, buffer)
                    buffer.copy_(before)
            with self.engine.full_params(()):
                pass  # no gathered weight is left, which the next update would not change
            for parameter, learns in learning:
                if parameter.requires_grad != learns:
                    parameter.requires_grad = learns


class _Search:
    """The search of one step."""

    def __init__(
        self,
        run: NonFiniteSearch,
        rerun: Rerun,
        step: int,
        group: Group,
        names: dict[nn.Module, str],
    ) -> None:
        self.run, self.step, self.group, self.names = run, step, group, names
        self.loss, self.rerun = rerun.loss_of(step), rerun

    def forward(self, kept: list[Kept]) -> NonFiniteFound | None:
        """Return the first tensor of the forwards."""
        engine = self.run.engine

        def run(trace: Trace, batch: Batch, part: Microbatch) -> Origin | None:
            with torch.no_grad(), engine.microbatch(last=True):
                return trace.of_loss(self._loss(trace, batch))

        return self._first("forward", kept, run)

    def backward(self, kept: list[Kept]) -> NonFiniteFound:
        """Return the first tensor of the backwards, or why it is not known."""
        engine = self.run.engine
        if not isinstance(engine, RunsBackwardAgain):
            return self._unknown(
                "the forward of each microbatch is finite, so that the first tensor is one of the "
                "backward, which this driver cannot run again: --detect-anomaly names it"
            )

        def run(trace: Trace, batch: Batch, part: Microbatch) -> Origin | None:
            with engine.without_update():
                loss = self._loss(trace, batch)
                weight = self.rerun.weight(part, self.run._num_items)
                return run_backward(trace, loss, torch.full_like(loss.detach(), weight))

        return self._first("backward", kept, run) or self._unknown(
            "nothing that is not finite came up when its microbatches were run again one by one. "
            "The sum of their gradients may overflow, or the step depends on something that a "
            "second run does not repeat"
        )

    def _first(
        self, phase: str, kept: list[Kept], run: Callable[[Trace, Batch, Microbatch], Origin | None]
    ) -> NonFiniteFound | None:
        session = self.run.session
        device = session.world.device
        batches = session.feed(each.batch() for each in kept)
        for number, (each, batch) in enumerate(zip(kept, batches, strict=True)):
            found: dict[str, Any] | None = None
            try:
                assert each.random is not None, "`of` returns those whose forward has begun"
                set_torch_random_state(device, each.random)
                trace = Trace(self.names, batch, phase == "backward")
                origin = run(trace, batch, each.part)
                if origin is not None:
                    found = {**origin.to_json(), **self._sample(origin, each.part)}
            except Exception as error:  # the run itself can continue
                found = {"error": f"{last_line(error):.500}"}
            everyone = session.exchange(found)
            if errors := [one["error"] for one in everyone if one and "error" in one]:
                return self._unknown(f"the {phase} could not be run again: {errors[0]}")
            ranks = [rank for rank, one in enumerate(everyone) if one]
            if ranks:
                rank = min(ranks, key=lambda rank: (everyone[rank]["order"], rank))
                return self._named(phase, everyone[rank], rank, number)
        return None

    def _loss(self, trace: Trace, batch: Batch) -> Tensor:
        with trace, self.run.engine.autocast():
            return self.loss(self.run.engine.module, batch)

    def _sample(self, origin: Origin, part: Microbatch) -> dict[str, Any]:
        """Find the sample among the rows of a microbatch, of which some are repeated."""
        rows, size = origin.rows, max(1, part.num_samples)
        if not rows:
            return {"sample": None, "data": "", "samples": 0, "size": 0}
        known = origin.num_rows == size * part.repeats
        samples = sorted({row % size for row in rows} if known else rows)
        data = ""
        if known and self.rerun.where is not None:
            position = Position(self.group.position.epoch, part.offset + samples[0])
            data = self.rerun.where(position, 1)
        of_all = {"samples": len(samples), "size": size if known else origin.num_rows}
        return {"sample": samples[0], "data": data, **of_all}

    def _unknown(self, why: str) -> NonFiniteFound:
        return NonFiniteFound(self.step, f"step {self.step} is not finite: {why}")

    def _named(self, phase: str, found: Any, rank: int, microbatch: int) -> NonFiniteFound:
        where = [f"on rank {rank}"] if self.run.session.world.size > 1 else []
        where.append(f"in microbatch {microbatch}")
        if found["samples"] > 1 and found["samples"] == found["size"]:
            where.append(f"all {found['samples']} samples")
        elif found["sample"] is not None:
            more = found["samples"] - 1
            others = f" and {more} other sample{'s' * (more > 1)}" if more else ""
            data = f" ({found['data']})" if found["data"] else ""
            where.append(f"sample {found['sample']}{others}{data}")
        inputs = f"; it was computed from {found['inputs']}" if found["inputs"] else ""
        reached = ""
        if phase == "backward" and found["operation"]:
            reached = f"; it makes the gradient of `{found['tensor']}` not finite"
        return NonFiniteFound(
            step=self.step,
            text=f"step {self.step} is not finite: {found['text']} is the first {found['values']}, "
            f"{', '.join(where)}{inputs}{reached}",
            phase=phase,
            values=found["values"],
            module=found["module"],
            operation=found["operation"],
            tensor=found["tensor"],
            place=found["place"],
            rank=rank,
            microbatch=microbatch,
            sample=found["sample"],
            data=found["data"],
        )


def _has_generator(device: torch.device) -> bool:
    """True for a device whose random state torch keeps; others compute later than they are
    called, too."""
    if device.type == "cpu":
        return True
    try:
        return hasattr(torch.get_device_module(device), "get_rng_state")
    except RuntimeError:
        return False
