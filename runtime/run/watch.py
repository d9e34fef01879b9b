"""The observer that converts events to records, and sends the records to sinks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TextIO

from ..kernel.errors import printable
from ..kernel.events import Logged, RunStarted, StepEnded, Warned
from ..trainer.recovery import RankLost, Rejoined
from ..trainer.settings import PRECISIONS
from .format import describe
from .output import write_now
from .peak import Peak, measure_peak
from .records import Record, record_of, to_line
from .system_figures import SystemFigures

__all__ = ["DIGESTS", "Sink", "Watcher", "print_json", "print_lines"]

DIGESTS = "step_digests"
"""The event of a record of digests."""
Sink = Callable[[Record], None]


class Watcher:
    """Converts each event to a record, completes it, and passes it to every sink.

    All ranks have a watcher, since the peak is measured on all together; only rank 0 has sinks. The
    end of a step has no figures and makes no record: `on_step` is called with its number.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        item_name: str,
        on_step: Callable[[int], None] | None = None,
    ) -> None:
        self.sinks = sinks
        self.item_name = item_name
        self.on_step = on_step
        self.peak: Peak | None = None
        self._began, self._made = time.time(), time.perf_counter()
        self.started: RunStarted | None = None
        self._system: SystemFigures | None = None

    def __call__(self, event: Any) -> None:
        if isinstance(event, StepEnded):
            if self.on_step is not None:
                self.on_step(event.step)
            return
        if isinstance(event, RankLost | Rejoined):
            self._made, self._began = time.perf_counter(), time.time()
        extra: Record = {}
        if isinstance(event, RunStarted):
            extra = self._start(event)
        elif isinstance(event, Logged) and self.started is not None:
            extra = self._complete(event, self.started)
        for sink in self.sinks:
            sink({**record_of(event), **extra})

    def _start(self, event: RunStarted) -> Record:
        ranks, self.started = self.started and self.started.world.size, event
        starting = time.perf_counter() - self._made  # from here on the run's own clock counts
        if self.sinks:
            self._system = SystemFigures(event.world.device)
        if self.peak is not None and ranks:  # the ranks that are left
            speed = self.peak.flops / ranks * event.world.size
            self.peak = replace(self.peak, flops=speed, ranks=event.world.size)
        elif event.flops_per_item is not None:
            dtype = PRECISIONS[event.settings.precision].compute
            self.peak = measure_peak(event.world.device, dtype, event.world.size)
        return {
            "peak": str(self.peak) if self.peak else None,
            "peak_flops": self.peak.flops if self.peak else None,
            "began": round(self._began, 3),
            "starting_seconds": starting,
        }

    def _measure_again(self, started: RunStarted) -> None:
        """Measure the peak again after training exceeded it: another program was busy during the
        first measurement."""
        dtype = PRECISIONS[started.settings.precision].compute
        again = measure_peak(started.world.device, dtype, started.world.size)
        if again is not None and self.peak is not None and again.flops > self.peak.flops:
            self.peak = again
            for sink in self.sinks:
                sink(record_of(Warned(f"the device was busy at the start: MFU is now of {again}")))

    def _complete(self, event: Logged, started: RunStarted) -> Record:
        mfu = None
        if self.peak is not None and started.flops_per_item is not None:
            achieved = started.flops_per_item * event.items_per_second
            if achieved > self.peak.flops:
                self._measure_again(started)
            mfu = min(1.0, achieved / self.peak.flops)
        total = started.total_steps
        return {
            "total_steps": total,
            "seconds_left": None if total is None else (total - event.step) * event.step_seconds,
            "item_name": self.item_name,
            "mfu": mfu,
            **(self._system.now() if self._system else {}),
        }


def print_lines(record: Record) -> None:
    """Print a plain line for a record; a sink."""
    line = describe(record)
    if line is not None:
        write_now(f"{printable(line)}\n", sys.stdout)


def print_json(stream: TextIO = sys.stdout) -> Sink:
    """Print a record as a line of JSON; a sink. Digests are not for readers, and are left out."""

    def sink(record: Record) -> None:
        if record["event"] != DIGESTS:
            write_now(to_line(record), stream)

    return sink
