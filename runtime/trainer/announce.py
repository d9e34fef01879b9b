"""Events of a run, and `Announcer`, which passes them to the observers."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from ..kernel.batches import Position
from ..kernel.errors import NonFiniteTraining
from ..kernel.events import Event, Logged, Observer, Requests, StepSkipped
from ..kernel.loop import TrainLoop
from ..kernel.optional import KeepsWrites
from ..kernel.paths import Place
from .recipe_checks import output_is_gone
from .step_clock import OBSERVERS, STARTING, StepClock
from .weight_writes import open_to_writes

__all__ = ["Announcer", "log_of", "never_finite", "unused_note"]

_NO_TURNS: Mapping[str, float] = MappingProxyType({})


class Announcer:
    """Passes an event to all observers, and their requests to `requests`. Any thread may call
    it."""

    def __init__(self, observers: Sequence[Observer], requests: Requests, clock: StepClock) -> None:
        self.observers, self.requests, self.clock = observers, requests, clock
        self._one_at_a_time = threading.RLock()
        self._kept: list[BaseException] | None = None
        self.engine: KeepsWrites | None = None
        """The engine of the steps, if observers may write to weights and it must know of that."""
        self.failed = ""
        """The observer and the event of the first error that was kept."""

    def keep_errors(self) -> None:
        """From now on, keep the errors of observers instead of raising them: the last step is done,
        and has to be saved. All observers receive all events."""
        if self._kept is None:
            self._kept = []

    @property
    def error(self) -> BaseException | None:
        """The first error that was kept."""
        return self._kept[0] if self._kept else None

    def raise_errors(self) -> None:
        """Raise the first error that was kept, if any; keep no more."""
        error, self._kept = self.error, None
        if error is not None:
            raise error

    def __call__(self, event: Event) -> None:
        with self._one_at_a_time:
            if threading.get_ident() != self.clock.thread:
                for observer in self.observers:
                    self._send(observer, event)
                return
            if self.clock.part == STARTING:
                for observer in self.observers:
                    self._send(observer, event, self.engine)
                return
            before, since = self.clock.mark(OBSERVERS), time.perf_counter()
            for observer in self.observers:
                self._send(observer, event, self.engine)
                since = self.clock.observed(observer, since)
            self.clock.mark(before)

    def _send(self, observer: Observer, event: Event, engine: KeepsWrites | None = None) -> None:
        try:
            if engine is None:
                self.requests.ask(observer(event))
                return
            with open_to_writes(engine, observer, _described(observer, event)):
                self.requests.ask(observer(event))
        except (Exception, SystemExit) as error:
            if self._kept is None or output_is_gone(error):
                raise
            if not self._kept:
                self.failed = _described(observer, event)
            self._kept.append(error)


def _described(observer: Observer, event: Event) -> str:
    name = getattr(observer, "__name__", type(observer).__name__)
    return f"the observer {name} (at {type(event).__name__})"


def log_of(
    training: TrainLoop,
    length_at: Callable[[Position], float | None],
    clock: StepClock,
    losses: Mapping[str, float] = _NO_TURNS,
) -> Logged:
    """Return the event for the steps since the last log. `length_at`: returns the samples of the
    epoch of a position, if known. `losses`: the mean loss of each turn. Waits for the device."""
    figures = training.window.figures(training.progress, training.session)
    progress = training.progress
    position = progress.position
    part = position.samples / (length_at(position) or math.inf)
    return Logged(
        step=progress.step,
        epoch=position.epoch + part,
        learning_rate=float(training.engine.param_groups[0]["lr"]),
        items=progress.items,
        samples=progress.samples,
        skipped=progress.skipped,
        losses=losses,
        parts=clock.take(),
        **figures,
    )


def unused_note(names: Sequence[str]) -> str:
    """Describe the parameters that have no gradient."""
    shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    return (
        f"no gradient reached {shown} in the first step: they stay as they are until one does. "
        "Freeze them (requires_grad=False) or leave them out if that is meant"
    )


def never_finite(
    event: StepSkipped, applied: int, limit: int, last: Place | None, first: str
) -> NonFiniteTraining:
    """Return the error for too many consecutive steps that could not be applied. `applied` steps
    were applied before. `first`: the first tensor that was not finite, if it was searched for."""
    first = first and f". {first[0].upper()}{first[1:]}"
    if not applied:
        return NonFiniteTraining(
            f"step {event.step}: loss {event.loss}, gradient norm {event.grad_norm}, the last for "
            f"{event.samples}: no step could be applied, so that the weights are the initial ones, "
            "and the learning rate is not the cause. Look for values that are not finite in the "
            f"data, the loss and the initial weights, or raise precision{first}"
        )
    kept = f"the last checkpoint is {last}" if last else "none saved"
    return NonFiniteTraining(
        f"step {event.step}: loss {event.loss}, gradient norm {event.grad_norm}: "
        f"{event.in_a_row} steps in a row could not be applied (max_nonfinite={limit}), the last "
        f"for {event.samples}; {kept}. The weights are those before these steps. Lower "
        f"optimizer.lr, check the data, or raise precision{first}"
    )
