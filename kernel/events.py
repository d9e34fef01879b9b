"""The records that observers get: one for each event.

An observer is a callable that takes an event. It changes nothing; it may return a `Request`, which
all ranks agree on at the next step boundary, whichever rank it came from. Events that hold
figures are sent on every rank with equal figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol, runtime_checkable

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
    "StatefulObserver",
    "StepEnded",
    "StepSkipped",
    "Warned",
]


class Request(IntEnum):
    """An action that an observer, or a signal, asks for."""

    LOG = 0
    EVALUATE = 1
    SAVE = 2
    STOP = 3
    PREEMPT = 4
    """Stop, and exit with `EXIT_PREEMPTED`."""
    WRITTEN = 5
    """The loop's own: this rank has written its share of the checkpoint under way."""
    JOIN = 6
    """The loop's own: processes wait to join the ranks."""


class Requests:
    """Requests of this rank that have not been sent yet.

    `send` hands them over as one number each, to be added up over ranks with the step's own tally,
    so that agreeing costs no communication of its own."""

    def __init__(self) -> None:
        self._asked = [0.0] * len(Request)

    def ask(self, request: Request | None) -> None:
        """Remember a request; None is none."""
        if isinstance(request, Request):
            self._asked[request] = 1.0

    def is_asked(self, request: Request) -> bool:
        """Return True until the request is sent."""
        return bool(self._asked[request])

    def send(self) -> Sequence[float]:
        """One number for each kind of request; they count as handed over."""
        asked, self._asked = self._asked, [0.0] * len(self._asked)
        return asked


class Event:
    """A record that observers get."""


@dataclass(frozen=True)
class RunStarted(Event):
    """Everything is built; the first step follows."""

    backend: str
    world: World
    settings: Any
    """The `Settings` in force."""
    total_steps: int | None
    """Number of steps; None: until the data ends."""
    steps_per_epoch: int | None
    """Number of steps with full global batches; None where the data has no length."""
    num_samples: int | None
    num_parameters: int
    first_step: int
    """0, or the step that the run resumes from."""
    out: Place | None
    flops_per_item: float | None


@dataclass(frozen=True)
class Resumed(Event):
    """State was taken from a checkpoint. `notes` name what differs from the run that wrote it."""

    path: Place
    step: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepEnded(Event):
    """One update is done (or queued on the device). Nothing here waits for the device."""

    step: int


@dataclass(frozen=True)
class StepSkipped(Event):
    """The gradient of this step was not finite and nothing was applied."""

    step: int
    in_a_row: int
    loss: float
    grad_norm: float
    samples: str = ""
    """Description of the samples, over all ranks."""


@dataclass(frozen=True)
class LossSpiked(Event):
    """The loss of this step was far above the usual one (see `SpikeSettings`)."""

    step: int
    loss: float
    usual: float
    """The median of the steps before."""
    samples: str
    """Description of the samples, over all ranks."""


@dataclass(frozen=True)
class RolledBack(Event):
    """Training continues from a checkpoint; the steps after it are undone."""

    step: int
    """Step of the checkpoint."""
    path: Place
    left_out: int
    """Number of groups of samples, one a step, that the run skips from now on."""


@dataclass(frozen=True)
class Logged(Event):
    """Figures since the last log, the mean over steps where a step has one."""

    step: int
    epoch: float
    loss: float
    """Mean loss an item."""
    grad_norm: float
    """Gradient norm of the last step, before clipping."""
    learning_rate: float
    """Learning rate of the first parameter group in the last step."""
    items: int
    """Items trained on since the run's very first step."""
    samples: int
    skipped: int
    """Steps not applied since the run's very first step."""
    step_seconds: float
    items_per_second: float
    samples_per_second: float
    losses: Mapping[str, float] = field(default_factory=dict)
    """Losses of updates that take turns (`Recipe.loss`), by the name of the turn."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Seconds of this rank since the last log, by what they were spent on."""


@dataclass(frozen=True)
class Evaluated(Event):
    """One pass over an evaluation data set is done."""

    step: int
    name: str
    metrics: Mapping[str, float]
    seconds: float


@dataclass(frozen=True)
class Saved(Event):
    """A checkpoint is complete. Where `error` gives a reason, it is not: the previous one is."""

    step: int
    path: Place
    seconds: float
    """Time in which training stood still for the save."""
    error: str = ""
    buffer_bytes: int = 0
    """Host memory that held a copy on this rank; 0 when it was not saved in the background."""


@dataclass(frozen=True)
class RankLate(Event):
    """A rank keeps others waiting (`stall_seconds`); sent by another thread, at any time."""

    step: int
    """Number of steps that this rank has done."""
    rank: int
    seconds: float
    what: str
    """Place where the rank is, and which ranks wait for it in which call."""


@dataclass(frozen=True)
class Warned(Event):
    """Something the user should know; the run continues."""

    message: str


@dataclass(frozen=True)
class RunEnded(Event):
    """The last event."""

    step: int
    reason: str
    """`finished`, `stopped` (an observer asked) or `preempted` (a signal asked)."""
    seconds: float
    lost_ranks: int = 0
    """Number of ranks that died while the others continued."""


Observer = Callable[[Any], "Request | None"]


@runtime_checkable
class StatefulObserver(Protocol):
    """An observer whose state is saved with each checkpoint, and restored from it."""

    def __call__(self, event: Any) -> Request | None: ...

    def state_dict(self) -> Mapping[str, Any]:
        """JSON types, equal on every rank; that of rank 0 is saved."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave, on every rank. Raises ValueError where it cannot."""
