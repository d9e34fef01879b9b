"""Sixty planted slownesses and twenty clean runs: what is named, with which share."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, Subset, default_collate

from .harness import ROOT, Benchmark, Column, Measured, torchrun
from .timed_calls import TimedCalls

__all__ = ["BENCHMARKS"]

STEPS, BATCH, COMPUTE = 60, 4, 0.008
"""Steps of each run, samples of a step, and seconds of a forward."""
POINTS = 0.05
"""Difference of a share from the truth that is allowed."""
SLOW = (0.25, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
"""Planted seconds a step, in forwards."""
PLANTED = {
    "input": ("slow samples", 8),
    "workers": ("too few workers", 8),
    "collate": ("a slow collate", 8),
    "rank": ("a slow rank of two", 8),
    "evaluation": ("a slow evaluation", 7),
    "saving": ("a slow save", 7),
    "observer": ("a slow observer", 7),
    "synchronisation": ("`.item()`, on request", 7),
}
CLEAN = 20


class Rows(torch.utils.data.Dataset[Tensor]):
    """Rows whose fetching takes so long."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> Tensor:
        if self.seconds:
            time.sleep(self.seconds)
        return torch.full((4,), index / 4096)


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return (torch.full((4,), index / 4096) for index in range(4096))


def loss(module: nn.Module, batch: Tensor) -> Tensor:
    time.sleep(COMPUTE)
    summed: Tensor = module(batch).square().sum()
    return summed


class _Timed:
    """The time of the steps after the first, by a clock of its own; and what was named."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.verdicts: list[Mapping[str, Any]] = []
        self.planted = 0.0
        """Seconds that were planted after the first step."""

    def __call__(self, event: Any) -> None:
        name = type(event).__name__
        if name == "StepEnded":
            self.at.append(time.perf_counter())
        elif name == "TimeSpent":
            self.verdicts = list(event.verdicts)

    @property
    def seconds(self) -> float:
        return self.at[-1] - self.at[0]

    def sleep(self, seconds: float) -> None:
        """Plant it, and note how long it really took."""
        began = time.perf_counter()
        time.sleep(seconds)
        if self.at:
            self.planted += time.perf_counter() - began


def train(
    seen: _Timed,
    recipe: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    observers: tuple[Callable[[Any], None], ...] = (),
    backend: str = "cpu",
    out: str | None = None,
) -> None:
    from drivetrain import Recipe, Settings
    from drivetrain.trainer.fit import fit
    from drivetrain.trainer.setting_values import override

    given = {"steps": STEPS, "global_batch": BATCH, "evaluate.at_end": False}
    given |= {"evaluate.sanity_check": False, "checkpoint.at_end": False}
    parts = {"loss": loss, "train_data": Rows(), **(recipe or {})}
    fit(
        Recipe(model=lambda: nn.Linear(4, 1), **parts),
        override(Settings(), {**given, **(settings or {})}),
        backend=backend,
        out=out,
        observers=[seen, *observers],
    )


# --- what is planted ------------------------------------------------------------------------------


def _input(seen: _Timed, seconds: float) -> float:
    class Slow(Rows):
        def __getitem__(self, index: int) -> Tensor:
            seen.sleep(seconds / BATCH)
            return super().__getitem__(index)

    train(seen, {"train_data": Slow()})
    return seen.planted


def _workers(seen: _Timed, seconds: float) -> float:
    """Workers whose samples take longer than the rest of a step by `seconds`: it cannot be seen
    from here how long they slept. The truth is the time from the end of each step to the next
    forward, above that of a run without workers, which waits for none."""
    sample = (COMPUTE + seconds) / BATCH
    usual = statistics.median(_gaps(_Timed(), Rows(), workers=0))
    return sum(gap - usual for gap in _gaps(seen, Rows(sample), workers=1))


def _gaps(seen: _Timed, data: Rows, workers: int) -> list[float]:
    """Train; return the seconds from the end of each step to the next forward."""
    forwards: list[float] = []

    def noted(module: nn.Module, batch: Tensor) -> Tensor:
        forwards.append(time.perf_counter())
        return loss(module, batch)

    train(seen, {"train_data": data, "loss": noted}, {"data.workers": workers})
    return [min(each for each in forwards if each > end) - end for end in seen.at[:-1]]


def _collate(seen: _Timed, seconds: float) -> float:
    def collate(samples: list[Tensor]) -> Tensor:
        seen.sleep(seconds)
        made: Tensor = default_collate(samples)
        return made

    train(seen, {"collate": collate})
    return seen.planted


def _evaluation(seen: _Timed, seconds: float) -> float:
    # one step more, here and of saves: what comes after the last StepEnded is in no truth
    from drivetrain.trainer.evaluations import Evaluations

    def measure(module: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        time.sleep(5 * seconds)
        return {"loss": module(batch).square().sum()}

    recipe = {"eval_data": {"held out": Subset(Rows(), range(BATCH))}, "measure": measure}
    with TimedCalls(Evaluations, "run") as calls:
        train(seen, recipe, {"evaluate.every": 5, "steps": STEPS + 1})
    return sum(calls.seconds)


def _saving(seen: _Timed, seconds: float) -> float:
    from drivetrain.checkpoint import CheckpointStore

    with tempfile.TemporaryDirectory() as folder:
        settings = {"checkpoint.every": 10, "steps": STEPS + 1}
        with TimedCalls(CheckpointStore, "save", 10 * seconds) as calls:
            train(seen, None, settings, out=f"{folder}/run")
    return sum(calls.seconds)


def _observer(seen: _Timed, seconds: float) -> float:
    def draws(event: Any) -> None:
        if type(event).__name__ == "StepEnded":
            seen.sleep(seconds)

    train(seen, observers=(draws,))
    return seen.planted


def _synchronisation(seen: _Timed, seconds: float) -> float:
    """On a host `.item()` waits for nothing, and its share of the time is nothing."""

    def waits(module: nn.Module, batch: Tensor) -> Tensor:
        result = loss(module, batch)
        result.item()
        return result

    train(seen, {"loss": waits}, {"find_synchronisations": True})
    return 0.0


_PLANTS: dict[str, Callable[[_Timed, float], float]] = {
    "input": _input,
    "workers": _workers,
    "collate": _collate,
    "evaluation": _evaluation,
    "saving": _saving,
    "observer": _observer,
    "synchronisation": _synchronisation,
}


def _clean(seen: _Timed, number: int) -> None:
    """Runs of many kinds, of which nothing takes long."""
    kinds: list[Callable[[], None]] = [
        lambda: train(seen),
        lambda: train(seen, {"train_data": Rows(0.0001)}),
        lambda: train(seen, settings={"data.workers": 1}),
        lambda: train(seen, {"train_data": Rows(0.001)}, {"data.workers": 2}),
        lambda: train(seen, {"train_data": Stream()}),
        lambda: train(seen, settings={"micro_batch": 2}),
        lambda: train(seen, settings={"log_every": 1}),
        lambda: train(
            seen,
            {"eval_data": {"held out": Subset(Rows(), range(BATCH))}},
            {"evaluate.every": 20, "find_synchronisations": True},
        ),
        lambda: _with_saves(seen),
        lambda: train(seen, observers=(lambda event: None,)),
    ]
    kinds[number % len(kinds)]()


def _with_saves(seen: _Timed) -> None:
    with tempfile.TemporaryDirectory() as folder:
        train(seen, None, {"checkpoint.every": 60, "steps": 3 * STEPS}, out=f"{folder}/run")


# --- what is named --------------------------------------------------------------------------------


def measure(candidate: str, quick: bool) -> Measured:
    """Runs, those whose planted slowness alone was named, and those whose share was close."""
    if candidate == "clean":
        count = 2 if quick else CLEAN
        spoken = 0
        for number in range(count):
            seen = _Timed()
            if number % 10 == 9:
                seen.verdicts, _ = _on_ranks("", 0.0)
            else:
                _clean(seen, number)
            spoken += bool(seen.verdicts)
            _show(candidate, number, seen.verdicts, 0.0)
        return {"runs": count, "named": count - spoken, "close": count - spoken, "wrong": spoken}
    count = 1 if quick else PLANTED[candidate][1]
    figures = {"runs": count, "named": 0, "close": 0, "wrong": 0, "off": 0.0}
    for number in range(count):
        seconds = COMPUTE * SLOW[number + len(SLOW) - PLANTED[candidate][1]]
        seen = _Timed()
        if candidate == "rank":
            seen.verdicts, truth = _on_ranks(("compute", "data")[number % 2], seconds)
        else:
            truth = _PLANTS[candidate](seen, seconds) / seen.seconds
        found = [each for each in seen.verdicts if each["kind"] == candidate]
        off = abs(found[0]["share"] - truth) if found else 1.0
        figures["named"] += bool(found)
        figures["close"] += off <= POINTS
        figures["wrong"] += len(seen.verdicts) - len(found)
        figures["off"] = max(figures["off"], off)
        _show(candidate, number, seen.verdicts, truth)
    return figures


def _show(candidate: str, number: int, verdicts: list[Mapping[str, Any]], truth: float) -> None:
    words = [f"{each['kind']} {each['share']:.0%}" for each in verdicts] or ["nothing"]
    print(f"{candidate} {number + 1}: {', '.join(words)}; truth {truth:.0%}", file=sys.stderr)


def _on_ranks(part: str, seconds: float) -> tuple[list[Mapping[str, Any]], float]:
    """The verdicts of a run on two ranks, of which the second is slower in that part, and the
    truth."""
    with tempfile.TemporaryDirectory() as folder:
        command = torchrun(2, folder)
        command += ["-m", "benchmarks.verdicts", part or "nothing", str(seconds)]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return found["verdicts"], found["truth"]


def _as_rank(part: str, seconds: float) -> None:
    torch.set_num_threads(1)
    seen, rank = _Timed(), int(os.environ["RANK"])
    late = seconds if rank == 1 else 0.0

    class Own(Rows):
        def __getitem__(self, index: int) -> Tensor:
            if part == "data" and late:
                seen.sleep(late / (BATCH // 2))
            return super().__getitem__(index)

    def own(module: nn.Module, batch: Tensor) -> Tensor:
        if part == "compute" and late:
            seen.sleep(late)
        return loss(module, batch)

    train(seen, {"train_data": Own(), "loss": own}, backend="ddp")
    if rank == 0:
        truth = seconds * (STEPS - 1) / seen.seconds
        verdicts = [dict(each) for each in seen.verdicts]
        print(json.dumps({"verdicts": verdicts, "truth": truth}), flush=True)


BENCHMARKS = [
    Benchmark(
        "verdicts",
        "Sentences about a run's time, of planted slownesses",
        f"Runs of {STEPS} steps of {1000 * COMPUTE:g} ms, each with one slowness of another size, "
        "and clean runs of ten kinds. Named: the sentence about the planted one is there; close: "
        f"its share is within {100 * POINTS:g} points of what was planted, by a clock of its own; "
        "wrong: any other sentence. See [where the time goes](guides/time.md).",
        {**{name: title for name, (title, _) in PLANTED.items()}, "clean": "clean runs"},
        measure,
        (
            Column("runs", "runs", digits=0),
            Column("named (of clean runs: silent)", "named", digits=0),
            Column("share within 5 points", "close", digits=0),
            Column("farthest share, points", "off", scale=100, digits=1),
            Column("wrong sentences", "wrong", digits=0),
        ),
        plotted="share within 5 points",
    )
]

if __name__ == "__main__":
    _as_rank(sys.argv[1], float(sys.argv[2]))
