"""`TrainLoop` runs the steps; a `LoopPolicy` decides when to log, evaluate, save and stop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from enum import Enum
from itertools import chain
from typing import Protocol

from torch import Tensor

from .batches import ENDLESS, Group, Groups, Position, items_of, split_evenly
from .contract import Engine, Outcome, Session
from .errors import RecipeError
from .events import Requests, StepSkipped
from .optional import Audits
from .progress import Progress, Window
from .recipe import Batch, Recipe
from .shards import Reader
from .step import Stepper, StepPlace, StepResult

__all__ = ["LoopPolicy", "NextAction", "TrainLoop"]


class NextAction(Enum):
    """The reason why steps end, or that they continue."""

    CONTINUE = "continue"
    NEXT_EPOCH = "next epoch"
    """Skip the rest of this epoch."""
    ROLLED_BACK = "rolled back"
    """Continue from the state that `TrainLoop.restore` has set."""
    STOPPED = "stopped"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    """All steps are done, or there is no more data."""


class LoopPolicy(Protocol):
    """Decides what happens between steps. Every rank must decide alike."""

    def before_update(self, loop: TrainLoop) -> None:
        """Set learning rates. Called right before an update."""

    def after_step(self, loop: TrainLoop, group: Group, result: StepResult) -> NextAction:
        """Decide after an update. `TrainLoop.agreed` returns what ranks asked for."""

    def skipped(self, loop: TrainLoop, event: StepSkipped, group: Group) -> None:
        """A step was not applied; called at the latest before the next update. May raise. `group`:
        its data, of which the microbatches are used up."""


class TrainLoop:
    """The steps of one run on one rank. Every method is called by all ranks in the same order.

    `total_steps`: None trains until the data ends. `mark` is called with the name of what the time
    from then on is spent on: `data` (waiting for a batch), `copy` (to the device) or `compute`."""

    def __init__(
        self,
        recipe: Recipe,
        session: Session,
        engine: Engine,
        data: Groups,
        total_steps: int | None,
        policy: LoopPolicy,
        requests: Requests,
        mark: Callable[[str], object] = bool,
    ) -> None:
        self.mark = mark
        self.recipe, self.session, self.engine = recipe, session, engine
        self.data, self.total_steps = data, ENDLESS if total_steps is None else total_steps
        self.policy, self.requests = policy, requests
        self.stepper = Stepper(recipe, engine, session)
        self.progress = Progress()
        self.window = Window(self.progress)
        self._skipped_in_a_row = 0
        self._audit = engine.audit if isinstance(engine, Audits) else None
        self._updates, self._audited = 0, -1
        self._pending_outcome: tuple[Outcome, Tensor, Group] | None = None

    # --- saving and resuming --------------------------------------------------------------

    def restore(self, reader: Reader, progress: Progress, window: Window) -> None:
        """Restore all but random state from a checkpoint of any driver, or change nothing."""
        self.engine.restore(reader)
        self._pending_outcome, self._skipped_in_a_row = None, 0
        self.progress, self.window = progress, window

    def audit(self) -> None:
        """Have the engine check itself, once a step at most; see `Audits`."""
        if self._audit is not None and self._audited != self.progress.step:
            self._audited = self.progress.step
            self._audit()

    # --- the loop -------------------------------------------------------------------------

    def run(self) -> NextAction:
        """Run the remaining steps, or until the policy ends them; return why they ended."""
        while self.progress.step < self.total_steps:
            first = self.progress.step
            then = self._steps()
            if then is NextAction.NEXT_EPOCH:
                if self.progress.position.samples:
                    self.progress.position = Position(self.progress.position.epoch + 1)
            elif then is NextAction.CONTINUE:
                if self.progress.step == first:
                    self.stepper.compare(self._place(), 0.0, self.requests.send())
                    self.stepper.sums()  # raises where other ranks have more
                    break  # no more data
            elif then is not NextAction.ROLLED_BACK:
                return then
        return NextAction.FINISHED

    def _steps(self) -> NextAction:
        """Run steps from the position on, until the data ends or the policy ends them."""
        self.engine.module.train()  # `feed` looks at the mode
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
                    self._place(group.num_samples, group.digest),
                )
                progress.step += 1
                progress.position = group.next
                progress.samples += group.num_samples
                progress.items += int(result.items)
                self._pending_outcome = result.outcome, result.loss, group
                self.window.add(result.loss, result.outcome.grad_norm)
                self._updates += 1
                if not self._updates & (self._updates - 1):  # 1, 2, 4, 8 and so on
                    self.audit()
                then = self.policy.after_step(self, group, result)
                if then is not NextAction.CONTINUE:
                    return then
        return NextAction.CONTINUE

    def _place(self, num_samples: int = 0, digest: int = 0) -> StepPlace:
        """Return the place of the next step. `num_samples`: 0 once the data has ended."""
        epoch, start, _ = self.progress.position
        return StepPlace(self.progress.step + 1, epoch, start, num_samples, digest)

    def start_window(self) -> None:
        """Start the steps of the next log."""
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
        of_mean = self.recipe.loss_is == "mean" and self.recipe.step is None
        mark = self.mark

        def on_host() -> Iterator[Batch]:
            mark("data")
            for group in groups:
                microbatches, num_items = group.microbatches, group.num_items
                counted: list[float] = []
                if num_items is None and count is not None:
                    # the items of the whole group must be known before its first backward
                    fetched = list(microbatches)
                    counted = [items_of(part, count) for part in fetched]
                    microbatches, num_items = iter(fetched), sum(counted)
                elif num_items is None:
                    num_items = split_evenly(group.num_samples, *reader)[1]
                if not num_items >= 0:
                    raise RecipeError(
                        f"recipe.count_items came to {num_items} for {group.num_samples} samples; "
                        "it must return the number of items in a batch, at least 0"
                    )
                entered.append((group, num_items))
                for index, part in enumerate(microbatches):
                    weight = 1 / part.repeats if part.num_samples else 0.0
                    if of_mean:
                        weight = counted[index] if counted else items_of(part, count)
                    weights.append(weight)
                    mark("copy")
                    yield part.batch
                    mark("data")

        mark("copy")
        for batch in self.session.feed(on_host()):
            mark("compute")
            yield batch, weights.popleft()
            mark("copy")

    def resolve_pending_outcome(self) -> None:
        """Learn if the last update was applied, with the next one queued up to its own by now."""
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
