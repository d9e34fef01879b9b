"""Events of a run, and the one that gives them to its observers."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence

from ..data.open_dataset import Source
from ..kernel.errors import NonFiniteTraining
from ..kernel.events import Event, Logged, Observer, Requests, StepSkipped
from ..kernel.loop import TrainLoop
from ..kernel.paths import Place

__all__ = ["Announcer", "log_of", "never_finite", "unused_note"]


class Announcer:
    """Call it with an event: all observers get it, and `requests` get what they ask for. Any
    thread may."""

    def __init__(self, observers: Sequence[Observer], requests: Requests) -> None:
        self.observers, self.requests = observers, requests
        self._one_at_a_time = threading.RLock()

    def __call__(self, event: Event) -> None:
        with self._one_at_a_time:
            for observer in self.observers:
                self.requests.ask(observer(event))


def log_of(training: TrainLoop, source: Source, losses: Mapping[str, float]) -> Logged:
    """The steps since the last log; `losses`: by turn. Waits for the device."""
    progress = training.progress
    position = progress.position
    part = position.samples / (source.length_at(position) or math.inf)
    return Logged(
        step=progress.step,
        epoch=position.epoch + part,
        learning_rate=float(training.engine.param_groups[0]["lr"]),
        items=progress.items,
        samples=progress.samples,
        skipped=progress.skipped,
        losses=losses,
        **training.window.figures(progress, training.session),
    )


def unused_note(names: Sequence[str]) -> str:
    """Of parameters without a gradient."""
    shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    return (
        f"no gradient reached {shown} in the first step: they stay as they are until one does. "
        "Freeze them (requires_grad=False) or leave them out if that is meant"
    )


def never_finite(
    event: StepSkipped, samples: str, limit: int, last: Place | None
) -> NonFiniteTraining:
    """The error of a run of which too many steps in a row could not be applied."""
    kept = f"the last checkpoint is {last}" if last else "none saved"
    return NonFiniteTraining(
        f"step {event.step}: loss {event.loss}, gradient norm {event.grad_norm}: "
        f"{event.in_a_row} steps in a row could not be applied (max_nonfinite={limit}), the last "
        f"for {samples}; {kept}. The weights are those before these steps. Lower optimizer.lr, "
        "check the data, or raise precision"
    )
