"""The records that observers get: one for each event.

An observer is a callable that takes an event. It changes nothing; it may return a `Request`, which
all ranks agree on at the next step boundary, whichever rank it came from. Events that carry
figures are sent on every rank with equal figures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from .contract import World
from .paths import Place

__all__ = [
    "Evaluated",
    "Event",
    "Logged",
    "LossSpiked",
    "Observer",
    "RankLate",
    "Request",
    "Requests",
    "Resumed",
    "RolledBack",
    "RunEnded",
    "RunStarted",
    "Saved",
    "StepEnded",
    "StepSkipped",
    "Warned",
]


class Request(IntEnum):
    """A wish of an observer, or of a signal."""

    LOG = 0
    EVALUATE = 1
    SAVE = 2
    STOP = 3
    PREEMPT = 4
    """Stop, and exit with `EXIT_PREEMPTED`."""
    WRITTEN = 5
    """The loop's own: this rank has written its share of the checkpoint under way."""


_NOTHING = (0.0,) * len(Request)


class Requests:
    """Requests of this rank that have not been sent yet.

    `send` hands them over as one number each, to be added up over ranks with the step's own tally,
    so that agreeing costs no communication of its own.
    """

    def __init__(self) -> None:
        self._asked: set[Request] = set()

    def ask(self, request: Request | None) -> None:
        """Remember a request; None is none."""
        if request is not None:
            self._asked.add(request)

    def is_asked(self, request: Request) -> bool:
        """True until it is sent."""
        return request in self._asked

    def send(self) -> Sequence[float]:
        """One number for each kind of request; they count as handed over."""
        if not self._asked:
            return _NOTHING
        numbers = [float(request in self._asked) for request in Request]
        self._asked.clear()
        return numbers


@dataclass(frozen=True)
class RunStarted:
    """Everything is built; the first step follows."""

    backend: str
    world: World
    settings: Any
    """The `Settings` in force."""
    total_steps: int | None
    """None: until the data ends."""
    steps_per_epoch: int | None
    """None where the data has no length."""
    num_samples: int | None
    num_parameters: int
    first_step: int
    """0, or the step that the run resumes from."""
    out: Place | None
    flops_per_item: float | None


@dataclass(frozen=True)
class Resumed:
    """State was taken from a checkpoint. `notes` name what differs from the run that wrote it."""

    path: Place
    step: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepEnded:
    """One update is done (or queued on the device). Nothing here waits for the device."""

    step: int


@dataclass(frozen=True)
class StepSkipped:
    """The gradient of this step was not finite and nothing was applied."""

    step: int
    in_a_row: int
    loss: float
    grad_norm: float
    samples: str = ""
    """Which ones, in words, over all ranks."""


@dataclass(frozen=True)
class LossSpiked:
    """The loss of this step was far above the usual one (see `SpikeSettings`)."""

    step: int
    loss: float
    usual: float
    """The median of the steps before."""
    samples: str
    """Which ones, in words, over all ranks."""


@dataclass(frozen=True)
class RolledBack:
    """Training goes on from a checkpoint, as if the steps after it had not been."""

    step: int
    """Of the checkpoint."""
    path: Place
    left_out: int
    """Groups of samples, one a step, that the run does without from here on."""


@dataclass(frozen=True)
class Logged:
    """Figures since the last log, the mean over steps where a step has one."""

    step: int
    epoch: float
    loss: float
    """Mean loss an item."""
    grad_norm: float
    """Of the last step, before clipping."""
    learning_rate: float
    """Of the first parameter group in the last step."""
    items: int
    """Items trained on since the run's very first step."""
    samples: int
    skipped: int
    """Steps not applied since the run's very first step."""
    step_seconds: float
    items_per_second: float
    samples_per_second: float
    losses: Mapping[str, float] = field(default_factory=dict)
    """Of updates that take turns (`Recipe.loss`), by the name of the turn."""


@dataclass(frozen=True)
class Evaluated:
    """One evaluation data set was gone through once."""

    step: int
    name: str
    metrics: Mapping[str, float]
    seconds: float


@dataclass(frozen=True)
class Saved:
    """A checkpoint is complete. `error` tells why it is not: the last one before it still is."""

    step: int
    path: Place
    seconds: float
    """That training stood still for it."""
    error: str = ""
    buffer_bytes: int = 0
    """Host memory that held a copy on this rank; 0 when it was not saved in the background."""


@dataclass(frozen=True)
class RankLate:
    """A rank keeps others waiting (`stall_seconds`); sent by another thread, between others."""

    step: int
    """That this rank has done."""
    rank: int
    seconds: float
    what: str
    """Where it is, and who waits for it in which call."""


@dataclass(frozen=True)
class Warned:
    """Something the user should know; the run goes on."""

    message: str


@dataclass(frozen=True)
class RunEnded:
    """The last event."""

    step: int
    reason: str
    """`finished`, `stopped` (an observer asked) or `preempted` (a signal asked)."""
    seconds: float


Event = (
    RunStarted
    | Resumed
    | StepEnded
    | StepSkipped
    | LossSpiked
    | RolledBack
    | Logged
    | Evaluated
    | Saved
    | RankLate
    | Warned
    | RunEnded
)
Observer = Callable[[Any], "Request | None"]
