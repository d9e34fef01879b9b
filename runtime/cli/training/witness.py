"""`drivetrain witness`: trains what lies between a run's checkpoints again, and compares."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from ...checkpoint import checkpoints_of, list_checkpoints
from ...kernel.errors import CheckpointNotFound, printable
from ...kernel.paths import place
from ...run.output import write_now
from ...run.record_file import RecordFile
from ...run.recorded_steps import RecordedSteps
from ...run.run_folder import METRICS, find_earlier, records_folder

__all__ = ["WitnessRequest", "witness"]

EQUAL, DIFFERENT, NOT_JUDGED = 0, 1, 2
_MOST_SHOWN = 20
_END = "\n"
_NOT_LOGGED = "none of these steps was logged with digests; see log_every and digests"
_DRAWS = (
    "the training draws random numbers (dropout, say), which are others on another number of ranks "
    "or kind of device; give the --backend and --nproc of the run, or a driver of as many ranks"
)


@dataclass(frozen=True, kw_only=True)
class WitnessRequest:
    """Arguments of the command line."""

    run: str
    replay: Sequence[str]
    """Arguments for each `drivetrain replay`: the recipe, the driver, processes and settings."""
    every: int
    """The number of checkpoints of which one is judged."""
    follow: float | None
    """Seconds between looks for new checkpoints until the run has ended; None: do not wait."""
    json: bool


@dataclass(frozen=True)
class Stretch:
    """The steps after one checkpoint of a run, up to the next one."""

    after: int
    last: int
    logged: tuple[int, ...]
    """Its steps that have digests."""


@dataclass(frozen=True)
class Verdict:
    """The result for a stretch. `found`: what `replay` printed; empty if it could not compare."""

    stretch: Stretch
    code: int
    found: dict[str, Any]
    seconds: float
    reason: str = ""
    """Why the stretch was not judged."""

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON types."""
        outcome = ("equal", "different", "not judged")[self.code]
        span = {"after": self.stretch.after, "last": self.stretch.last}
        rest = self.found if self.found else {"reason": self.reason}
        return {**span, "outcome": outcome, "seconds": round(self.seconds, 1), **rest}

    def lines(self) -> list[str]:
        """Describe the result in lines of text."""
        span = f"steps {self.stretch.after + 1} to {self.stretch.last}"
        if self.code == NOT_JUDGED:
            return [f"{span}: not judged: {self.reason.partition(_END)[0]}"]
        how = "bit for bit" if self.found["exact"] else "within rounding"
        steps = len(self.found["compared_steps"])
        what = f"{steps} logged step{'s' * (steps != 1)}"
        if self.found["checkpoint_compared"]:
            what += " and the checkpoint"
        if self.code == EQUAL:
            on = self.found["backend"]
            return [f"{span}: equal {how} ({what}; {self.seconds:.0f} s with {on})"]
        texts = self.found["texts"]
        more = len(texts) - _MOST_SHOWN
        lines = [
            f"{span}: different at {texts[0]}",
            *(f"  {each}" for each in texts[1:_MOST_SHOWN]),
        ]
        return [*lines, f"  and {more} more"] if more > 0 else lines


def witness(request: WitnessRequest) -> int:
    """Judge each stretch in a process of its own; return the exit code: 0 if all that were judged
    are equal, 1 if one is different. Raises `DrivetrainError`, also if none could be judged."""
    codes = []
    for stretch in _stretches(request):
        verdict = _judge(request, stretch)
        codes.append(verdict.code)
        lines = [json.dumps(verdict.to_json())] if request.json else verdict.lines()
        write_now("".join(f"{printable(line)}\n" for line in lines), sys.stdout)
    if DIFFERENT not in codes and EQUAL not in codes:
        raise CheckpointNotFound(
            f"{request.run} has nothing to judge: {len(codes)} of its checkpoints could be "
            "compared with the steps before it. Train it with checkpoint.every, "
            "checkpoint.keep_last, digests=weights, the default, and a log_every that is reached"
        )
    return DIFFERENT if DIFFERENT in codes else EQUAL


def _stretches(request: WitnessRequest) -> Iterator[Stretch]:
    """Yield the stretches to judge, in the order of their steps, as checkpoints are completed."""
    earlier = find_earlier(place(request.run))
    folder = checkpoints_of(earlier.source)
    records = _Records(records_folder(earlier.folder) / METRICS)
    done, number = set[int](), 0
    while True:
        records.read()
        ended = records.ended  # the end is checked first
        complete = [found.step for found in list_checkpoints(folder).complete]
        records.read()  # the logs before these checkpoints
        news = False
        for after, last in pairwise([*([0] if records.from_start else []), *complete]):
            if last in done or last <= after:
                continue
            done.add(last)
            news, number = True, number + 1
            logged = tuple(sorted(s for s in records.recorded.steps if after < s <= last))
            if number % request.every == 0:
                yield Stretch(after, last, logged)
        if request.follow is None or (ended and not news):
            return
        if not news:
            time.sleep(request.follow)


def _judge(request: WitnessRequest, stretch: Stretch) -> Verdict:
    """Train a stretch again up to its last step that was logged. Only of such a step the checkpoint
    is compared."""
    if not stretch.logged:
        return Verdict(stretch, NOT_JUDGED, {}, 0.0, _NOT_LOGGED)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="drivetrain-") as folder:
        command = [sys.executable, "-m", "drivetrain.cli", "replay", request.run, *request.replay]
        command += [f"--step={stretch.logged[-1]}", f"--save={folder}/run", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - began
    found = _record_in(done.stdout) if done.returncode in (EQUAL, DIFFERENT) else {}
    if not found:
        reason = done.stderr.strip() or f"replay ended with exit code {done.returncode}"
        return Verdict(stretch, NOT_JUDGED, {}, seconds, reason.removeprefix("error: "))
    if found["draws_others"] and done.returncode == DIFFERENT:
        return Verdict(stretch, NOT_JUDGED, {}, seconds, _DRAWS)
    return Verdict(stretch, done.returncode, found, seconds)


def _record_in(text: str) -> dict[str, Any]:
    """Return the JSON object that ends a text, after what the recipe has printed; empty without
    one."""
    start = 0 if text.startswith("{") else text.rfind("\n{\n") + 1
    try:
        found = json.loads(text[start:])
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


class _Records:
    """Reads a run's metrics, each line once."""

    def __init__(self, metrics: Path) -> None:
        self._metrics = metrics
        self._reopen()

    def _reopen(self) -> None:
        self.recorded, self.ended = RecordedSteps(), False
        self._file = RecordFile(self._metrics)

    @property
    def from_start(self) -> bool:
        """True if the run trained from step 0 on."""
        return self.recorded.first is not None and self.recorded.first["first_step"] == 0

    def read(self) -> None:
        """Read the lines that were added. Raises `CheckpointNotFound` if there is no file."""
        if not self._metrics.is_file():
            raise CheckpointNotFound(
                f"{self._metrics} is not there: what a run records is compared"
            )
        if self._file.was_replaced():
            self._reopen()
        for record in chain.from_iterable(self._file.new()):
            self.recorded.add(record)
            if record["event"] in ("run_started", "run_ended"):
                self.ended = record["event"] == "run_ended"
