"""The observer of the command line: events become records, and records go to sinks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from ..kernel.errors import printable
from ..kernel.events import Logged, RunStarted, StepEnded, Warned
from ..trainer.settings import PRECISIONS
from .format import describe
from .output import put_out
from .peak import Peak, measure_peak
from .records import Record, record_of, to_line

__all__ = ["Sink", "Watcher", "print_json", "print_lines"]

Sink = Callable[[Record], None]


class Watcher:
    """Turns each event into a record, completes it, and gives it to every sink.

    All ranks watch, since all are timed together for the peak; only rank 0 has sinks. The end of a
    step has no figures and makes no record: `on_step` is called with its number.
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
        self.started: RunStarted | None = None

    def __call__(self, event: Any) -> None:
        if isinstance(event, StepEnded):
            if self.on_step is not None:
                self.on_step(event.step)
            return
        extra: Record = {}
        if isinstance(event, RunStarted):
            extra = self._start(event)
        elif isinstance(event, Logged) and self.started is not None:
            extra = self._complete(event, self.started)
        for sink in self.sinks:
            sink({**record_of(event), **extra})

    def _start(self, event: RunStarted) -> Record:
        self.started = event
        if event.flops_per_item is not None:
            dtype = PRECISIONS[event.settings.precision].compute
            self.peak = measure_peak(event.world.device, dtype, event.world.size)
        return {
            "peak": str(self.peak) if self.peak else None,
            "peak_flops": self.peak.flops if self.peak else None,
        }

    def _measure_again(self, started: RunStarted) -> None:
        """Training beat the peak: another program was busy when it was measured."""
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
        }


def print_lines(record: Record) -> None:
    """A sink that prints one plain line a record."""
    line = describe(record)
    if line is not None:
        put_out(f"{printable(line)}\n", sys.stdout)


def print_json(stream: TextIO = sys.stdout) -> Sink:
    """A sink that prints one line of JSON a record."""

    def sink(record: Record) -> None:
        put_out(to_line(record), stream)

    return sink
