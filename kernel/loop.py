"""`TrainLoop` runs the steps; a `LoopPolicy` decides when to log, evaluate, save and stop."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from enum import Enum
from itertools import chain
from typing import Any, Protocol

from torch import Tensor

from .batches import ENDLESS, Group, Groups, Position, split_evenly
from .contract import Engine, Outcome, Session
from .errors import RecipeError
from .events import Requests, StepSkipped
from .progress import Progress, Window
from .recipe import Batch, Recipe
from .shards import Reader
from .step import Stepper, StepResult

__all__ = ["LoopPolicy", "NextAction", "TrainLoop"]


class NextAction(Enum):
    """The reason why steps end, or go on."""

    GO_ON = "go on"
    NEXT_EPOCH = "next epoch"
    """Leave the rest of this epoch out."""
    ROLLED_BACK = "rolled back"
    """Go on from where `TrainLoop.restore` has put the run."""
    STOPPED = "stopped"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    """All steps are done, or there is no more data."""


class LoopPolicy(Protocol):
    """Decides what happens between steps. Every rank must decide alike."""

    def before_update(self, loop: TrainLoop) -> None:
        """Right before an update: set learning rates."""
        ...

    def after_step(self, loop: TrainLoop, group: Group, result: StepResult) -> NextAction:
        """After an update. `TrainLoop.agreed` tells what ranks asked for."""
        ...

    def skipped(self, loop: TrainLoop, event: StepSkipped, group: Group) -> None:
        """A step was not applied; called at the latest before the next update. May raise. `group`:
        its data, of which the microbatches are used up."""
        ...


class TrainLoop:
    """The steps of one run on one rank. Every method is called by all ranks in the same order.

    `total_steps`: None goes on until the data ends.
    """

    def __init__(
        self,
        recipe: Recipe,
        session: Session,
        engine: Engine,
        data: Groups,
        total_steps: int | None,
        policy: LoopPolicy,
        requests: Requests,
    ) -> None:
        self.recipe, self.session, self.engine = recipe, session, engine
        self.data, self.total_steps = data, ENDLESS if total_steps is None else total_steps
        self.policy, self.requests = policy, requests
        self.stepper = Stepper(recipe, engine, session)
        self.progress = Progress()
        self.window = Window(self.progress)
        self._skipped_in_a_row = 0
        self._pending_outcome: tuple[Outcome, Tensor, Group] | None = None

    # --- saving and resuming --------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The part of a checkpoint that is no tensors (JSON types)."""
        self.resolve_pending_outcome()
        return {**self.progress.to_json(), "window": self.window.to_json(self.session)}

    def restore(self, reader: Reader, state: Mapping[str, Any], where: str) -> None:
        """Take over a checkpoint, of any driver, or raise before anything is changed: its
        tensors, and what `state` gave then. Random state is the caller's matter. Raises
        `CheckpointDamaged`, naming `where`, for a malformed state."""
        progress = Progress.from_json(state, where) if state else Progress()
        window = Window(progress)
        if stored := state.get("window"):
            window.restore(stored, self.session, where)
        self.engine.restore(reader)
        self._pending_outcome, self._skipped_in_a_row = None, 0
        self.progress, self.window = progress, window

    # --- the loop -------------------------------------------------------------------------

    def run(self) -> NextAction:
        """All remaining steps, or until the policy ends them; returns why they ended."""
        while self.progress.step < self.total_steps:
            first = self.progress.step
            then = self._steps()
            if then is NextAction.NEXT_EPOCH:
                if self.progress.position.samples:
                    self.progress.position = Position(self.progress.position.epoch + 1)
            elif then is NextAction.GO_ON:
                if self.progress.step == first:
                    break  # no more data
            elif then is not NextAction.ROLLED_BACK:
                return then
        return NextAction.FINISHED

    def _steps(self) -> NextAction:
        """Steps from the position on, until the data ends or the policy wants something else."""
        self.engine.module.train()  # which tells `feed` what the batches are for
        progress = self.progress
        groups = self.data.groups(progress.position, self.total_steps - progress.step)
        entered: deque[tuple[Group, float]] = deque()
        microbatches = self._on_device(groups, entered)

        def before_update() -> None:
            self.resolve_pending_outcome()
            self.policy.before_update(self)

        with closing(groups):  # type: ignore[type-var]
            for first in microbatches:
                group, num_items = entered.popleft()
                result = self.stepper(
                    chain((first,), microbatches),
                    group.num_microbatches,
                    num_items,
                    before_update,
                    self.requests.send(),
                    progress.step + 1,
                )
                progress.step += 1
                progress.position = group.next
                progress.samples += group.num_samples
                progress.items += int(result.items)
                self._pending_outcome = result.outcome, result.loss, group
                self.window.add(result.loss, result.outcome.grad_norm)
                then = self.policy.after_step(self, group, result)
                if then is not NextAction.GO_ON:
                    return then
        return NextAction.GO_ON

    def start_window(self) -> None:
        """From here on are the steps of the next log."""
        self.window = Window(self.progress)

    def agreed(self, result: StepResult) -> Sequence[float]:
        """For each `Request`, how many ranks had made it when this step began."""
        if self.session.world.size > 1 or not any(late := self.requests.send()):
            return result.requests
        # nobody to agree with: what came in during the step counts at once
        return [a + b for a, b in zip(result.requests, late, strict=True)]

    def _on_device(
        self, groups: Iterator[Group], entered: deque[tuple[Group, float]]
    ) -> Iterator[tuple[Batch, float]]:
        """Every microbatch and its weight; `entered` has each group, and its items, before."""
        world, count = self.session.world, self.recipe.count_items
        reader = world.num_readers, world.reader_index
        weights: deque[float] = deque()

        def on_host() -> Iterator[Batch]:
            for group in groups:
                microbatches, num_items = group.microbatches, group.num_items
                if num_items is None and count is not None:
                    # the items of the whole group must be known before its first backward
                    fetched = list(microbatches)
                    num_items = sum(
                        count(part.batch) / part.repeats for part in fetched if part.num_samples
                    )
                    microbatches = iter(fetched)
                elif num_items is None:
                    num_items = split_evenly(group.num_samples, *reader)[1]
                if not num_items >= 0:
                    raise RecipeError(
                        f"recipe.count_items came to {num_items} for {group.num_samples} samples; "
                        "it must return the number of items in a batch, at least 0"
                    )
                entered.append((group, num_items))
                for part in microbatches:
                    weights.append(1 / part.repeats if part.num_samples else 0.0)
                    yield part.batch

        for batch in self.session.feed(on_host()):
            yield batch, weights.popleft()

    def resolve_pending_outcome(self) -> None:
        """Learn whether the last update was applied, as late as possible: the next one is queued
        up to its own update by now."""
        if self._pending_outcome is None:
            return
        (outcome, loss, group), self._pending_outcome = self._pending_outcome, None
        progress = self.progress
        if outcome.applied():
            progress.applied += 1
            self._skipped_in_a_row = 0
            return
        progress.skipped += 1
        self._skipped_in_a_row += 1
        step = progress.applied + progress.skipped
        value = float(self.session.reduce(loss)) / self.session.world.num_feeders
        norm = float(outcome.grad_norm)
        self.policy.skipped(self, StepSkipped(step, self._skipped_in_a_row, value, norm), group)
