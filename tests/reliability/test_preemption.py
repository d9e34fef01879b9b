"""A signal to one rank, whatever that rank is doing: all ranks agree on one checkpoint, and the
exit code is 75.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from few_cases import only_quick
from torch import Tensor, nn

from drivetrain import Recipe
from drivetrain.checkpoint import CheckpointReader, list_checkpoints
from drivetrain.kernel.errors import EXIT_PREEMPTED
from drivetrain.kernel.events import Requests, RunStarted
from drivetrain.trainer import signals
from drivetrain.trainer.fit import fit

from .dying import interposed
from .runs import SETTINGS, build, everything, loss, recipe, start

STEPS, STEP = 6, 3
"""Number of steps of a run, and the step in which the signal comes, counted from 0."""
KEEPS_ALL = replace(
    SETTINGS,
    steps=STEPS,
    micro_batch=2,
    evaluate=replace(SETTINGS.evaluate, every=STEP + 1),
    checkpoint=replace(SETTINGS.checkpoint, keep_last=STEPS + 1),
)
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@dataclass(frozen=True)
class Phase:
    """A part of a run in which a signal comes, and the step that is saved then."""

    name: str
    step: int
    finishes: bool = False
    """True if nothing but the end of the run is left to do."""
    in_step: bool = False
    """True if the signal comes within a step. With several ranks, the next step informs
    the others.
    """

    def __str__(self) -> str:
        return self.name


PHASES = [
    Phase("building", 0),
    Phase("started", 0),
    Phase("compiling", 1, in_step=True),
    Phase("training", STEP + 1, in_step=True),
    Phase("accumulation", STEP + 1, in_step=True),
    Phase("evaluation", STEP + 2),
    Phase("saving", STEP + 2),
    Phase("last evaluation", STEPS, finishes=True),
    Phase("closing", STEPS, finishes=True),
]


@dataclass(frozen=True)
class Case:
    """A signal to one rank of a run. Without a phase there is no signal."""

    backend: str
    num_ranks: int
    phase: Phase | None = None
    number: int = 0
    victim: int = 0
    times: int = 1


class Signals:
    """Sends the signal when this rank reaches the phase, if the case names this rank."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.mine, self.seen = case, rank == case.victim, 0

    def at(self, phase: str, count: int = 0) -> None:
        """Send the signal when the rank reaches this phase, after `count` earlier times."""
        if self.mine and self.case.phase is not None and self.case.phase.name == phase:
            if self.seen == count:
                for _ in range(self.case.times):
                    os.kill(os.getpid(), self.case.number)
            self.seen += 1


def signalled(signals: Signals) -> Recipe:
    """Return the recipe of `runs`, with a signal in one of its parts."""
    plain, evaluations = recipe(), itertools.count()

    def built() -> nn.Module:
        if not torch.empty(0).is_meta:  # a model without memory is checked before ranks meet
            signals.at("building")
        return build()

    def lossy(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        each = -(-SETTINGS.global_batch // signals.case.num_ranks // 2)
        signals.at("training", STEP * each)
        signals.at("accumulation", STEP * each + 1)
        return loss(module, batch)

    def measure(module: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        number = next(evaluations)
        signals.at("evaluation", 3)
        if number > len(plain.train_data) // (2 * signals.case.num_ranks) + 5:  # the second time
            signals.at("last evaluation")
        return {"loss": loss(module, batch)}

    return replace(plain, model=built, loss=lossy, measure=measure)


def preempted(case: Case, out: Path, environment: dict[str, str]) -> None:
    """Train on one rank, and exit as a command does."""
    os.environ.update(environment)
    signals = Signals(case, int(environment.get("RANK", "0")))
    settings = KEEPS_ALL
    if case.phase is not None and case.phase.name == "compiling":
        settings = replace(settings, compile=True, compile_options={"backend": "signals"})

        @torch._dynamo.register_backend(name="signals")
        def compiles(graph: Any, inputs: Any) -> Any:
            signals.at("compiling")
            return graph.forward

    def observe(event: Any) -> None:
        if isinstance(event, RunStarted):
            signals.at("started")

    saved = out / "checkpoints" / f".checkpoint-{STEP + 1:06d}.writing"

    def act(name: str, do: Any) -> None:
        if name == "write" and saved.exists():
            signals.at("saving")

    def finish(module: nn.Module) -> None:
        signals.at("closing")

    with interposed(out / "checkpoints", act):
        result = fit(
            signalled(signals),
            settings,
            backend=case.backend,
            out=out,
            resume="auto",
            observers=[observe],
            finish=finish,
        )
    sys.exit(EXIT_PREEMPTED if result.reason == "preempted" else 0)


def run(case: Case, out: Path) -> list[int | None]:
    ranks = start(case, out, case.num_ranks, preempted)
    for rank in ranks:
        rank.join(240)
    return [rank.exitcode for rank in ranks]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the folder of an uninterrupted run, with the checkpoints of all steps."""
    known: dict[tuple[str, int], Path] = {}

    def of(case: Case) -> Path:
        key = case.backend, case.num_ranks
        if key not in known:
            known[key] = tmp_path_factory.mktemp("whole")
            assert run(Case(*key), known[key]) == [0] * case.num_ranks
        return known[key]

    return of


QUICK = ("started", "training", "evaluation")


def cases() -> list[Any]:
    """Return all cases. One signal for each of `QUICK` on two ranks is quick, all others are
    slow.
    """
    quick = {
        Case("ddp", 2, phase, SIGNALS[index % 3], victim=(index + 1) % 2)
        for index, phase in enumerate(PHASES)
        if phase.name in QUICK
    }
    every = [
        Case(backend, num_ranks, phase, number, victim)
        for backend, num_ranks in (("cpu", 1), ("ddp", 2), ("fsdp", 2), ("deepspeed", 2))
        for phase in PHASES
        for number in SIGNALS
        for victim in range(num_ranks)
        # the others' phases are alike, and take as long as all else
        if backend in ("cpu", "ddp") or number == SIGNALS[victim]
        if (backend, phase.name) != ("deepspeed", "compiling")
    ]
    return [
        pytest.param(
            case,
            id=f"{case.backend}-{case.phase}-{signal.Signals(case.number).name}-{case.victim}",
            marks=[] if case in quick else [pytest.mark.slow],
        )
        for case in every
    ]


@pytest.mark.parametrize("case", cases())
def test_one_checkpoint_that_all_agree_on(tmp_path: Path, whole: Any, case: Case) -> None:
    assert case.phase is not None
    codes = run(case, tmp_path)
    assert codes == [0 if case.phase.finishes else EXIT_PREEMPTED] * case.num_ranks
    folder = tmp_path / "checkpoints"
    listing = list_checkpoints(folder)
    assert not listing.rejected
    newest = listing.complete[-1]
    assert newest.step == case.phase.step + (case.phase.in_step and case.num_ranks > 1)
    assert CheckpointReader(newest.folder).verify() == []
    if newest.step == 0 or case.phase.name == "compiling":  # another computation than the others'
        assert run(replace(case, phase=None), tmp_path) == [0] * case.num_ranks
        newest = list_checkpoints(folder).complete[-1]
        assert newest.step == STEPS
    expected = everything(whole(case) / "checkpoints" / newest.folder.name)
    found = everything(newest.folder)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, msg=name)


def test_signals_that_come_together_are_one(tmp_path: Path) -> None:
    case = Case("cpu", 1, PHASES[3], signal.SIGTERM, times=2)
    assert run(case, tmp_path) == [EXIT_PREEMPTED]


@pytest.mark.parametrize(("saves", "does"), [(True, "saving"), (False, "stopping")])
def test_the_first_is_answered_at_once(
    capfd: pytest.CaptureFixture[str], saves: bool, does: str
) -> None:
    """Require one message at the first signal, within the step: the main thread does not return
    from it.
    """
    with signals.preempt_on_signals(Requests(), saves):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)
        printed = capfd.readouterr().err
    assert printed.startswith(f"SIGINT: {does} after this step; press again to stop ")
    assert printed.count("\n") == 1


def waits(case: Case, out: Path, environment: dict[str, str]) -> None:
    """Let rank 0 sleep in a step, while the others wait for it in a collective."""
    os.environ.update(environment)
    signals._TOGETHER_SECONDS = 0.2
    rank = int(environment.get("RANK", "0"))

    def slow(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        (out / str(rank)).touch()
        if rank == 0:
            time.sleep(300)
        return loss(module, batch)

    fit(replace(recipe(), loss=slow), SETTINGS, backend=case.backend, out=out)


@pytest.mark.parametrize(
    "number",
    only_quick(SIGNALS, (signal.SIGTERM,)),
    ids=lambda number: signal.Signals(number).name,
)
def test_a_second_signal_stops_at_once(tmp_path: Path, number: int) -> None:
    ranks = start(Case("ddp", 2), tmp_path, 2, waits)
    while not all((tmp_path / str(rank)).exists() for rank in range(2)):
        assert all(rank.is_alive() for rank in ranks)
        time.sleep(0.02)
    for rank in ranks:
        os.kill(rank.pid or 0, number)
    time.sleep(1)  # far beyond what counts as the same signal, on a busy machine, too
    assert [rank.exitcode for rank in ranks] == [None, None]
    while alive := [rank for rank in ranks if rank.is_alive()]:  # again, where the first came late
        for rank in alive:  # at once, before one fails since the other is gone
            with contextlib.suppress(ProcessLookupError):  # ended since it was asked
                os.kill(rank.pid or 0, number)
        alive[0].join(0.3)
    assert [rank.exitcode for rank in ranks] == [128 + number] * 2
