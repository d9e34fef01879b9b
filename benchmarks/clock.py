"""Cost of dividing a run's time into parts, and of the digests that logs record: what is added to a
step is counted, and each is timed by itself, since two runs differ by more.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from .harness import Benchmark, Column, Measured
from .problems import GPT, collate
from .timed_calls import TimedCalls

__all__ = ["BENCHMARKS"]

STEPS, LOG_EVERY = 100, 10
LABELS = {"cpu": "one process", "ddp": "two processes, ddp"}


class _Counted:
    """Counts the calls of a method."""

    def __init__(self, owner: Any, name: str) -> None:
        self.calls, method = 0, getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return method(*args, **kwargs)

        setattr(owner, name, counted)
        self.undo = lambda: setattr(owner, name, method)


def measure(backend: str, candidate: str, quick: bool) -> Measured:
    """Seconds of a step, and of all that the division and the digests add to it."""
    from drivetrain import Recipe, Settings
    from drivetrain.backends.process_group.waits import Waits
    from drivetrain.data.fetch_times import FetchTimes
    from drivetrain.kernel.batches import Microbatch
    from drivetrain.kernel.events import StepEnded
    from drivetrain.trainer import digests
    from drivetrain.trainer.fit import fit
    from drivetrain.trainer.gradient_digests import GradientDigests
    from drivetrain.trainer.setting_values import override
    from drivetrain.trainer.step_clock import StepClock
    from drivetrain.trainer.time_accounting import TimeAccounting

    clocks, sessions = list[StepClock](), list[Any]()
    watch = StepClock.watch

    def noted(self: StepClock, session: Any) -> None:
        clocks.append(self)
        sessions.append(session)
        watch(self, session)

    StepClock.watch = noted  # type: ignore[method-assign]
    methods = {
        "mark": _Counted(StepClock, "mark"),
        "fetch": _Counted(FetchTimes, "add"),
        "observed": _Counted(StepClock, "observed"),
        "idle": _Counted(Waits, "end_work"),
    }
    logs = TimedCalls(TimeAccounting, "logged")
    digesting = [  # all are called at logs alone
        TimedCalls(digests, "part_digests"),
        TimedCalls(GradientDigests, "weights"),
        TimedCalls(GradientDigests, "gradients"),
        TimedCalls(digests.Digester, "begin"),  # and what it returns
    ]
    steps, at = 20 if quick else STEPS, list[float]()

    def ends(event: Any) -> None:
        if isinstance(event, StepEnded):
            at.append(time.perf_counter())

    costs: Measured = {}

    def time_each(_: Any) -> None:
        """While the session is open."""
        clock = StepClock()
        watch(clock, sessions[-1])
        times, batch = FetchTimes(), Microbatch(None, 1, 0)
        for method in methods.values():
            method.undo()
        costs["mark"] = _seconds_of(lambda: clock.mark("data"))
        costs["fetch"] = _seconds_of(lambda: times.add(batch)) + _seconds_of(time.perf_counter) * 3
        costs["observed"] = _seconds_of(lambda: clock.observed(ends, 0.0))
        waits = Waits()
        costs["idle"] = _seconds_of(lambda: waits.end_work(*waits.begin_work()))

    settings = {"steps": steps, "global_batch": GPT.batch, "log_every": LOG_EVERY}
    fit(
        Recipe(model=GPT.model, loss=GPT.sum, train_data=GPT.data(), collate=collate),
        override(Settings(), {**settings, "checkpoint.at_end": False}),
        backend=backend,
        observers=[ends],
        finish=time_each,
    )
    step = statistics.median(end - start for start, end in pairwise(at))
    calls = {name: method.calls / steps for name, method in methods.items()}
    added = sum(calls[name] * costs[name] for name in methods)
    judged = 5 * max(logs.seconds) / 1000  # at the logs 4, 8, 16, 32 and 64
    digested = sum(statistics.median(each.seconds) for each in digesting) / LOG_EVERY
    return {
        "step": step,
        "calls": sum(calls.values()),
        "added": added,
        "judged": judged,
        "digested": digested,
        "share": (added + judged + digested) / step,
    }


def _seconds_of(act: Callable[[], object], count: int = 20_000) -> float:
    """Return the time of one call, the least of five tries: other processes only add to it."""
    least = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(count):
            act()
        least = min(least, (time.perf_counter() - started) / count)
    return least


def _benchmark(name: str, title: str, backend: str, processes: int) -> Benchmark:
    return Benchmark(
        name,
        title,
        f"The GPT of 10 million parameters, logged every {LOG_EVERY} steps, with one observer. A "
        f"step takes the median of {STEPS}. The calls "
        "that [dividing the time](guides/time.md) adds to a step are counted in the run, and timed "
        "one by one beside it. Judging the time, which compares ranks, is spread over 1,000 steps. "
        "[Digests](guides/replay.md) of samples, gradients and weights are timed in the run: the "
        "median of its logs.",
        {backend: LABELS[backend]},
        lambda candidate, quick: measure(backend, candidate, quick),
        (
            Column("a step, ms", "step", scale=1e3, digits=1),
            Column("calls a step", "calls", digits=1),
            Column("added a step, µs", "added", scale=1e6),
            Column("judging, µs a step", "judged", scale=1e6),
            Column("digests, µs a step", "digested", scale=1e6),
            Column("% of a step", "share", scale=100, digits=4),
        ),
        plotted="% of a step",
        processes=processes,
    )


BENCHMARKS = [
    _benchmark("clock", "What dividing the time and digests cost", "cpu", 1),
    _benchmark("clock_ddp", "What dividing the time and digests cost, on two ranks", "ddp", 2),
]
