"""Profiles of a few steps by torch's own profiler."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ..kernel import events
from ..kernel.errors import SettingError

__all__ = ["Operation", "Profiled", "Profiler", "parse_steps"]

_STEP = "step "
_SHOWN = 10
"""Operations in `Profiled`."""


class Operation(NamedTuple):
    """An operation with its own time, which excludes the time of the operations that it calls."""

    name: str
    calls: int
    seconds: float
    share: float
    """Share of the time of all operations."""


@dataclass(frozen=True)
class Profiled:
    """An event: steps `first` to `step` of this rank were profiled."""

    first: int
    step: int
    path: Path
    """The trace, for https://ui.perfetto.dev or chrome://tracing."""
    device: str
    """Device whose time orders the operations: `cpu`, or the accelerator."""
    operations: Sequence[Operation]
    """The costliest operations."""


class Profiler:
    """An observer that profiles steps: `fit(..., observers=[Profiler(10, 13,
    Path("profile"))])`.

    It profiles steps `first` up to, and without, `end`, on every rank, with shapes and memory: each
    rank writes `steps-10-12.rank-0.json.gz` into `folder`. Other steps cost nothing. A run that
    ends earlier writes the steps so far. `report` is called on rank 0 with the files that were
    written, `warn` on each rank that cannot write its file; training continues.
    """

    def __init__(
        self,
        first: int,
        end: int,
        folder: Path,
        *,
        report: Callable[[Profiled], None] | None = None,
        warn: Callable[[str], None] = warnings.warn,
    ) -> None:
        if not 1 <= first < end:
            raise SettingError(f"profile is {first}:{end}; take steps from 1 on, such as 10:13")
        self.first, self.end, self.folder = first, end, folder
        self.report, self.warn = report, warn
        self._profile: Any = None
        self._span: Any = None
        self._rank = self._done = 0

    def __call__(self, event: events.Event) -> None:
        if isinstance(event, events.StepEnded):
            self._done = event.step
            if self._profile is not None:
                self._end_step()
                if event.step >= self.end - 1:
                    self.close()
                else:
                    self._begin_step()
            elif event.step == self.first - 1:
                self._start()
        elif isinstance(event, events.RunStarted):
            self._rank, self._done = event.world.rank, event.first_step
            if event.total_steps is not None:
                self.end = min(self.end, event.total_steps + 1)
            if event.first_step == self.first - 1:
                self._start()
            elif event.first_step >= self.first:
                self.warn(
                    f"step {self.first} was done before this run, which resumes at step "
                    f"{event.first_step}: nothing is profiled"
                )
        elif isinstance(event, events.RunEnded):
            self.close()

    def _start(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of profiling libraries that this machine lacks
            own = None if torch.accelerator.is_available() else [ProfilerActivity.CPU]
            self._profile = profile(activities=own, profile_memory=True, record_shapes=True)
            self._profile.start()
        self._begin_step()

    def _begin_step(self) -> None:
        self._span = record_function(f"{_STEP}{self._done + 1}")
        self._span.__enter__()

    def _end_step(self) -> None:
        span, self._span = self._span, None
        if span is not None:
            span.__exit__(None, None, None)

    def close(self) -> None:
        """Write the profile so far. Call it when a run ends with an error."""
        taken, self._profile = self._profile, None
        if taken is None:
            return
        self._end_step()
        taken.stop()
        last = min(self._done, self.end - 1)
        path = self.folder / f"steps-{self.first}-{last}.rank-{self._rank}.json.gz"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            taken.export_chrome_trace(str(path))
        except OSError as error:  # a trace is not worth a run
            with suppress(OSError):
                path.unlink(missing_ok=True)
            self.warn(f"{path} cannot be written ({error.strerror or error}): there is no profile")
            return
        if self.report is not None and self._rank == 0:
            device, costliest = _costliest(taken.key_averages())
            self.report(Profiled(self.first, last, path, device, costliest))


def _costliest(averages: Any) -> tuple[str, list[Operation]]:
    on_device = any(each.self_device_time_total > 0 for each in averages)
    field = "self_device_time_total" if on_device else "self_cpu_time_total"
    times = {
        each.key: (each.count, getattr(each, field))
        for each in averages
        if not each.key.startswith(_STEP)
    }
    total = sum(time for _, time in times.values()) or 1.0
    ordered = sorted(times.items(), key=lambda item: -item[1][1])[:_SHOWN]
    operations = [
        Operation(name, count, time / 1e6, time / total) for name, (count, time) in ordered
    ]
    return "device" if on_device else "cpu", operations


def parse_steps(text: str) -> tuple[int, int]:
    """Parse the steps to profile: `10:13` is steps 10, 11 and 12; `10` is step 10. Raises
    `SettingError`."""
    first, colon, end = text.partition(":")
    try:
        begin = int(first)
        return begin, int(end) if colon else begin + 1
    except ValueError:
        raise SettingError(
            f"--profile is {text!r}; give steps as FIRST:END, such as 10:13 for 10, 11 and 12"
        ) from None
