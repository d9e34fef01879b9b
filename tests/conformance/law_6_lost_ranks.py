"""Law 6, lost ranks. Ranks that continue without one that died compute what all would have, and so
do ranks with a spare that has taken its place.

What each of them holds is the state of the last step, and nothing of the step that was abandoned.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import lost_ranks
from ..checkpoint import CheckpointReader
from ..kernel.errors import CapabilityRefused, DrivetrainError
from ..kernel.events import RunStarted, StepEnded
from ..kernel.optional import HoldsParts, LeavesRanks
from ..ranks.fit import fit
from ..trainer.setting_values import override
from ..trainer.settings import Settings
from .bench import Bench
from .cases import Refused, check
from .jobs import accumulate, microbatches, optimizer_called, partition
from .judge import require, require_close, require_same_bits
from .problems import PROBLEMS, Sample, Samples
from .refusal import problem_for
from .state import KINDS, State, assemble, pieces, pieces_of, read_all
from .subject import Subject

STEPS = 8
DEATHS = ((4, 1), (7, 0))
"""The step in which a rank dies, and the rank. The second one writes the run folder."""
SETTINGS = {
    "steps": STEPS,
    "global_batch": 12,
    "log_every": 1,
    "optimizer.lr": 0.01,
    "checkpoint.every": 2,
    "evaluate.sanity_check": False,
}
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Dying:
    """Ends its rank in the forward of a step. In step `awaited_in` ranks wait for a spare. In the
    last step each rank notes a random number in the file `drawn`."""

    def __init__(
        self, deaths: Sequence[Sequence[int]], drawn: Path, awaited_in: int | None
    ) -> None:
        self.deaths = {tuple(death) for death in deaths}
        self.drawn, self.awaited_in = drawn, awaited_in
        self.step, self.launched = 0, -1

    def __call__(self, event: object) -> None:
        if isinstance(event, RunStarted):
            self.step = event.first_step
        elif isinstance(event, StepEnded):
            self.step = event.step

    def loss(self, problem: str, module: nn.Module, batch: Sample) -> Tensor:
        if self.launched < 0:
            knows = lost_ranks.is_reported()
            self.launched = lost_ranks.own_number() if knows else int(os.environ["RANK"])
        if self.step + 1 == self.awaited_in:
            while lost_ranks.num_missing() and not lost_ranks.spare_waits():
                time.sleep(0.01)  # a spare that waits joins at the end of the next step
        loss = PROBLEMS[problem].loss(module, batch)
        if (self.step + 1, self.launched) in self.deaths:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.step + 1 == STEPS:
            with self.drawn.open("a") as file:
                file.write(f"{float(torch.rand(()))}\n")
        return loss


def train(
    bench: Bench,
    *,
    ranks: int,
    problem: str,
    out: str,
    settings: dict[str, Any],
    deaths: Sequence[Sequence[int]] = (),
    awaited_in: int | None = None,
) -> dict[str, Any]:
    """Job that trains on ranks of its own, some of which die. Returns the events by name, the
    numbers that ranks have drawn, and the checkpoint; or the words of a refusal or an error."""
    for name in LAUNCHED:
        os.environ.pop(name, None)
    drawn = Path(f"{out} drawn")
    dying = Dying(deaths, drawn, awaited_in)
    recipe = PROBLEMS[problem].recipe(
        loss=partial(dying.loss, problem), train_data=Samples(problem, 30)
    )
    try:
        result = fit(
            recipe,
            override(Settings(), {**SETTINGS, **settings}),
            nproc=ranks,
            backend=bench.backend,
            backend_options=bench.options,
            out=out,
            observers=[dying],
            progress=False,
        )
    except CapabilityRefused as refusal:
        return {"refused": str(refusal)}
    except DrivetrainError as error:
        return {"failed": str(error)}
    events: dict[str, Any] = {"logged": [], "reformed": []}
    for line in Path(out, "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        events.setdefault(record["event"], []).append(record)
    numbers = [float(line) for line in drawn.read_text().split()]
    return {**events, "drawn": numbers, "checkpoint": str(result.checkpoint)}


@check()
def a_death_changes_no_number(subject: Subject) -> Refused | None:
    """Kill two of three or more ranks, one after the other, in a forward. Each log and the last
    state must be those of the undisturbed run, up to the rounding of other sums."""
    if not subject.can("multi_process"):
        return Refused(f"{subject.facts.name} has one rank")
    ranks = subject.world if subject.world > 2 else 2 * subject.world
    disturbed = same_course(subject, ranks, {"recover": "in_place"}, deaths=DEATHS)
    if isinstance(disturbed, Refused):
        return disturbed
    sizes = [record["world_size"] for record in disturbed["reformed"]]
    expected_sizes = [ranks - 1, ranks - 2]
    require(sizes == expected_sizes, f"ranks that continued: {sizes}, not {expected_sizes}")
    return None


@check()
def a_spare_changes_no_number(subject: Subject) -> Refused | None:
    """Kill a rank in a forward, and let a spare take its place. Each log and the last state must be
    those of the undisturbed run, and each rank must draw random numbers of its own."""
    if not subject.can("multi_process"):
        return Refused(f"{subject.facts.name} has one rank")
    settings = {"recover": "in_place", "spares": 1}
    disturbed = same_course(
        subject, subject.world, settings, deaths=DEATHS[:1], awaited_in=DEATHS[0][0] + 1
    )
    if isinstance(disturbed, Refused):
        return disturbed
    size, drawn = disturbed["reformed"][-1]["world_size"], disturbed["drawn"]
    require(size == subject.world, f"ranks with the spare: {size}, not {subject.world}")
    require(len(drawn) >= size, f"random numbers drawn in the last step: {drawn}")
    require(len(set(drawn)) == len(drawn), f"ranks have drawn the same random numbers: {drawn}")
    return None


def same_course(
    subject: Subject, ranks: int, settings: dict[str, Any], **disturbance: Any
) -> dict[str, Any] | Refused:
    """Require a run that is disturbed, and one that is not, to have the same logs and the same last
    state. Return what `train` does of the first."""
    problem = problem_for(subject, "regression")
    with tempfile.TemporaryDirectory() as folder:
        run = partial(subject.run, train, world=1, alone=True, problem=problem, ranks=ranks)
        (disturbed,) = run(out=f"{folder}/a", settings=settings, **disturbance)
        if "refused" in disturbed:
            require("recover=in_place" in disturbed["refused"], disturbed["refused"])
            return Refused(disturbed["refused"])
        require("failed" not in disturbed, f"the run ended: {disturbed.get('failed')}")
        (whole,) = run(out=f"{folder}/b", settings={})
        require("failed" not in whole, f"the undisturbed run ended: {whole.get('failed')}")
        states = [read_all(CheckpointReader(each["checkpoint"])) for each in (disturbed, whole)]
    for name in ("loss", "grad_norm"):
        last = {record["step"]: record[name] for record in disturbed["logged"]}
        expected = {record["step"]: record[name] for record in whole["logged"]}
        require(last.keys() == expected.keys(), f"steps logged: {sorted(last)}")
        require_close(name, list(last.values()), list(expected.values()), 1e-4)
    require_alike(*states)
    return dict(disturbed)


def require_alike(actual: State, expected: State) -> None:
    """Raise `LawBroken` unless the tensors are equal up to rounding."""
    for kind in ("weights", "optimizer"):
        names = expected[kind].keys()
        require(actual[kind].keys() == names, f"{kind}: {sorted(actual[kind].keys() ^ names)}")
        for name, tensor in expected[kind].items():
            alike = torch.allclose(actual[kind][name], tensor, rtol=1e-3, atol=1e-6)
            require(alike, f"{kind} {name!r} is not that of the undisturbed run")


def abandon(bench: Bench, *, problem: str) -> dict[str, Any] | None:
    """Job that does two updates, and abandons the third before its update. Returns what this rank
    would have saved after the second, and what it holds; None if the driver does not say."""
    chosen = PROBLEMS[problem]
    with bench.open() as session:
        engine = session.prepare(chosen.recipe(optimizer=optimizer_called("AdamW")))
        if not (isinstance(engine, HoldsParts) and isinstance(session, LeavesRanks)):
            return None
        engine.module.train()
        reader, readers = session.world.reader_index, session.world.num_readers
        planned = [partition(range(n, n + 6), reader, readers, None) for n in (0, 6, 12)]
        batches = session.feed(microbatches(chosen, planned))
        for parts in planned[:2]:
            accumulate(session, engine, chosen, batches, parts)
            engine.update()
        saved = pieces(engine)
        engine.begin_step()
        accumulate(session, engine, chosen, batches, planned[2])
        session.leave()
        alone = session.exchange(session.world.rank)
        return {
            "saved": saved,
            "part": engine.part(),
            "held": pieces_of(engine.held()),
            "alone": alone == [0] and session.world.size == 1,
        }


@check()
def what_ranks_hold_is_the_state(subject: Subject) -> Refused | None:
    """Require one rank of each part to hold, together, each element of the state before the
    abandoned step exactly once, and all ranks of a part to hold the same weights and moments."""
    if not subject.can("multi_process"):
        return Refused(f"{subject.facts.name} has one rank")
    problem = problem_for(subject, "normalised")
    answers = subject.run(abandon, problem=problem, alone=True)
    ranks = [answer for answer in answers if answer is not None]
    if len(ranks) < len(answers):
        return Refused(f"{subject.facts.name} does not say what a rank holds")
    require(all(rank["alone"] for rank in ranks), "a rank that left still communicates")
    saved, buffers = assemble([rank["saved"] for rank in ranks]), buffers_of(problem)
    of_part: dict[int, list[Any]] = {}
    for rank in ranks:
        require(rank["part"] is not None, "a rank says that its update was torn")
        of_part.setdefault(rank["part"][0], []).append(rank["held"])
    parts = [of_part[part][0] for part in sorted(of_part)]
    held = assemble(parts)
    for kind in KINDS:
        require_same_bits(f"{kind} held", held[kind], saved[kind])
    for part, copies in of_part.items():
        first, *others = [by_name(copy, buffers) for copy in copies]
        for other in others:
            require_same_bits(f"part {part} on several ranks", other, first)
    return None


def buffers_of(problem: str) -> set[str]:
    return {name for name, _ in PROBLEMS[problem].model().named_buffers()}


def by_name(held: Sequence[dict[str, Any]], buffers: set[str]) -> dict[str, Tensor]:
    """Return the tensors without buffers, in which ranks may differ."""
    return {f"{p['kind']} {p['name']}": p["tensor"] for p in held if p["name"] not in buffers}
