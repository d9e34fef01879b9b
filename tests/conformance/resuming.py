"""Runs that are resumed, readers that leave out or damage, and jobs that restore."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..checkpoint import CheckpointReader
from ..kernel.contract import Engine, Session
from ..kernel.shards import Kind, Reader, Region, TensorInfo
from .bench import Bench
from .jobs import accumulate, microbatches, optimizer_called
from .judge import LawBroken, require_same, require_same_bits
from .problems import PROBLEMS
from .refusal import problem_for
from .runs import run
from .state import KINDS, pieces, read_all, whole_weights
from .subject import Subject

STEPS = 9


SAMPLES = 22
"""Three updates an epoch, of 8, 8 and 6 samples."""


SETTINGS = {
    "steps": STEPS,
    "global_batch": 8,
    "micro_batch": 3,
    "log_every": 1,
    "optimizer.lr": 0.01,
    "checkpoint.every": 1,
    "checkpoint.keep_last": STEPS,
}


def record(
    subject: Subject,
    out: str,
    workers: int = 0,
    *,
    background: bool = False,
    problem: str = "dropout",
    settings: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    """Record a run to the end that saves after each step. `ids` are the samples of all ranks,
    `shown` the weights and buffers on each rank, and `state` the content of the last checkpoint.
    """
    ranks = subject.run(
        run,
        problem=problem_for(subject, problem),
        samples=SAMPLES,
        settings={
            **SETTINGS,
            "data.workers": workers,
            "checkpoint.background": background,
            **(settings or {}),
        },
        out=out,
        **arguments,
    )
    steps = zip(*(rank["ids"] for rank in ranks), strict=True)
    return {
        **ranks[0],
        "ids": [sorted({index for ids in step for index in ids}) for step in steps],
        "shown": [rank["weights"] for rank in ranks],
        "state": read_all(CheckpointReader(ranks[0]["checkpoint"])),
    }


_recorded: dict[tuple[Subject, str], dict[str, Any]] = {}


def recorded(subject: Subject, **how: Any) -> dict[str, Any]:
    """Record a run once, and keep its folder for other checks: training costs more than they do."""
    key = subject, json.dumps(how, sort_keys=True)
    if key not in _recorded:
        folder = tempfile.mkdtemp(prefix="drivetrain-recorded-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        _recorded[key] = record(subject, f"{folder}/run", **how)
    return _recorded[key]


def recorded_language(subject: Subject, problem: str) -> dict[str, Any]:
    """Record a run of the problem "language", or of its stand-in, that is evaluated at its end."""
    return recorded(subject, problem=problem, evaluate=[11])


def compare(resumed: Mapping[str, Any], straight: Mapping[str, Any], last: int) -> str | None:
    """Describe the first difference in the last steps, or in the bits of the final state; None
    without one.
    """
    figures = ("loss", "grad_norm", "learning_rate", "items", "samples")
    logs = [
        [[line[name] for name in figures] for line in reported["logged"][-last:]]
        for reported in (resumed, straight)
    ]
    try:
        require_same("samples of each step", resumed["ids"], straight["ids"][-last:])
        require_same(f"logged {', '.join(figures)}", *logs)
        for kind in KINDS:
            require_same_bits(kind, resumed["state"][kind], straight["state"][kind])
        metrics = [
            [reported["metrics"] for reported in run["evaluated"]] for run in (resumed, straight)
        ]
        require_same("metrics", *metrics)
        for number, shown in enumerate(zip(resumed["shown"], straight["shown"], strict=True)):
            require_same_bits(f"weights and buffers shown on rank {number}", *shown)
    except LawBroken as broken:
        return str(broken)
    return None


class WeightsAlone:
    """A `Reader` of a checkpoint, without its optimizer tensors."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    def names(self, kind: Kind) -> Any:
        return () if kind == "optimizer" else self.reader.names(kind)

    def info(self, kind: Kind, name: str) -> TensorInfo:
        return self.reader.info(kind, name)

    def read(self, kind: Kind, name: str, region: Region | None = None, out: Any = None) -> Any:
        return self.reader.read(kind, name, region, out)


class DamagedEntry(WeightsAlone):
    """A `Reader` of a checkpoint in which one entry of AdamW's state is damaged."""

    def __init__(self, reader: Reader, damage: str) -> None:
        super().__init__(reader)
        self.damage = damage
        state = "4.weight/step" if damage == "no number" else "4.weight/exp_avg"
        (self.entry,) = (name for name in reader.names("optimizer") if name.endswith(state))

    def names(self, kind: Kind) -> Any:
        names = self.reader.names(kind)
        if kind == "optimizer" and self.damage == "missing":
            return [name for name in names if name != self.entry]
        return [*names, f"no.{self.entry}"] if self._of_nobody(kind) else names

    def info(self, kind: Kind, name: str) -> TensorInfo:
        info = self.reader.info(kind, self._stored(kind, name))
        shaped = TensorInfo(info.dtype, (2, *info.shape[1:]))
        return shaped if self._is_hit(name, "misshapen") else info

    def read(self, kind: Kind, name: str, region: Region | None = None, out: Any = None) -> Any:
        tensor = self.reader.read(kind, self._stored(kind, name), region, out)
        if self._is_hit(name, "no number"):
            return torch.full_like(tensor, float("nan"))
        return tensor[:2] if self._is_hit(name, "misshapen") else tensor

    def _is_hit(self, name: str, damage: str) -> bool:
        return name == self.entry and self.damage == damage

    def _of_nobody(self, kind: Kind) -> bool:
        return kind == "optimizer" and self.damage == "of nobody"

    def _stored(self, kind: Kind, name: str) -> str:
        return name.removeprefix("no.") if self._of_nobody(kind) else name


def refuse(
    bench: Bench, *, problem: str, source: str, optimizer: str, damage: Sequence[str] = ()
) -> dict[str, Any]:
    """Job that trains a step, and tries to restore a checkpoint that must be refused. Returns the
    errors, and whether this rank's state is unchanged.
    """
    answers = {}
    with bench.open() as session:
        engine = session.prepare(PROBLEMS[problem].recipe(optimizer=optimizer_called(optimizer)))
        update(session, engine, problem)
        before = pieces(engine)
        reader = CheckpointReader(source)
        for name in damage or ("as it is",):
            reported = {"error": "none", "message": ""}
            try:
                engine.restore(DamagedEntry(reader, name) if damage else reader)
            except Exception as error:
                reported = {"error": type(error).__name__, "message": str(error)}
            answers[name] = {**reported, "unchanged": same_pieces(before, pieces(engine))}
    return answers


def same_pieces(before: Sequence[Any], after: Sequence[Any]) -> bool:
    """Return True if both lists hold the same names, regions and bits."""
    a, b = (
        {(piece["kind"], piece["name"], str(piece["region"])): piece["tensor"] for piece in each}
        for each in (before, after)
    )
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def update(session: Session, engine: Engine, problem: str) -> None:
    """Do one update, on four samples of each reader."""
    world = session.world
    mine = list(range(world.reader_index, 4 * world.num_readers, world.num_readers))
    chosen, planned = PROBLEMS[problem], [(mine, True)]
    batches = session.feed(microbatches(chosen, [planned]))
    engine.module.train()
    accumulate(session, engine, chosen, batches, planned)
    for group in engine.param_groups:
        group["lr"] = 0.01
    engine.update()


def restore(
    bench: Bench,
    *,
    problem: str,
    source: str,
    updates: bool = False,
    weights_only: bool = False,
    stepped: bool = False,
    optimizer: str = "AdamW",
) -> dict[str, Any]:
    """Job that prepares, restores, and returns all state. `stepped` runs an update before
    restoring, `updates` one after it.
    """
    with bench.open() as session:
        engine = session.prepare(PROBLEMS[problem].recipe(optimizer=optimizer_called(optimizer)))
        fresh = pieces(engine)
        if stepped:
            update(session, engine, problem)
        reader: Reader = CheckpointReader(source)
        engine.restore(WeightsAlone(reader) if weights_only else reader)
        if updates:
            update(session, engine, problem)
        whole = whole_weights(engine)
        return {
            "fresh": fresh,
            "state": pieces(engine),
            "tied": [list(group) for group in engine.tied],
            "num_parameters": engine.num_parameters,
            "whole": whole,
        }
