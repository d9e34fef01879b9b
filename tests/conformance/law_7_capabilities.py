"""Law 7. Each declared capability is proved, and each other one is refused by name.

A trait that can be measured and is not declared breaks the law, too.
"""

from __future__ import annotations

import dataclasses
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..kernel.errors import CollectiveFailed
from ..kernel.optional import WatchesRanks
from .bench import Bench
from .cases import Refused, check
from .jobs import microbatches, optimizer_called, partition, train
from .judge import require, require_same
from .problems import PROBLEMS, Sample
from .refusal import problem_for, refuses, refuses_precision
from .rehearsal import rehearse
from .subject import Subject


@check(precision=("fp32", "bf16", "fp16", "float8"))
def precisions(subject: Subject, precision: str) -> Refused | None:
    """Require that a declared precision trains, once its loss scale has settled; laws 1 and 2 set
    the bounds.
    """
    if precision not in subject.facts.precisions:
        return refuses_precision(subject, precision)
    seen = rehearse(subject, "regression", optimizer="SGD", steps=8, precision=precision)
    require(seen.applied[-1], f"of 8 updates, these were applied: {seen.applied}")
    return None


@check()
def multi_process(subject: Subject) -> Refused | None:
    """Require that two processes are one world, or are refused."""
    if not subject.can("multi_process"):
        return refuses(subject, "multi_process", "more than one process", {}, world=2)
    two = subject.at(2)
    worlds = two.run(world_of)
    require_same("ranks", [world["rank"] for world in worlds], list(range(two.world)))
    require_same("sizes", [world["size"] for world in worlds], [two.world] * two.world)
    return None


@check()
def without_a_launcher_a_process_is_alone(subject: Subject) -> Refused | None:
    """Require a world of one rank, or a refusal by a driver that needs several."""
    if subject.at(1).world > 1:
        return refuses(subject, "multiple_of_ranks", "1 rank", {}, world=1)
    (world,) = subject.at(1).run(world_of, launched=False)
    expected = {"rank": 0, "size": 1, "readers": 1, "feeders": 1}
    require_same("rank and size without a launcher", world, expected)
    return None


LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables that a launcher sets, and that a process without a launcher lacks."""

LATE = 1
"""The rank that keeps the others waiting."""


@check()
def stall_seconds(subject: Subject) -> Refused | None:
    """Require that a living rank which keeps others waiting is reported on all ranks, that no other
    rank is, and that the others wait for it.
    """
    if not subject.can("multi_process"):
        return None
    if not subject.can("stall_seconds"):
        asked = {"stall_seconds": 1.0}
        return refuses(subject, "stall_seconds", "stall_seconds=1.0", asked, world=2)
    with tempfile.TemporaryDirectory() as folder:
        reported = subject.at(2).run(
            late_ranks_reported, folder=folder, longest=5.0, stall_seconds=1.0
        )
    size = len(reported)
    sums = [each["sums"] for each in reported]
    require_same("the sums, as they are waited for", sums, [[float(size)]] * size)
    for rank, each in enumerate(reported):
        require_same(f"the late ranks that rank {rank} receives", each["late"], [LATE])
    return None


@check()
def timeout_seconds(subject: Subject) -> Refused | None:
    """Require that waiting ranks fail in time, with an error that names the late rank. The late
    rank fails, too, when it comes at last, and names no other rank.
    """
    if not subject.can("multi_process"):
        return None
    if not subject.can("timeout_seconds"):
        asked = {"timeout_seconds": 2.0}
        return refuses(subject, "timeout_seconds", "timeout_seconds=2.0", asked, world=2)
    with tempfile.TemporaryDirectory() as folder:
        reported = subject.at(2).run(
            late_ranks_blamed,
            alone=True,
            folder=folder,
            longest=25.0,  # a busy machine may start the other rank's call seconds later
            timeout_seconds=2.0,
            stall_seconds=None,
        )
    late = reported.pop(LATE)
    for waiting in reported:
        require(waiting["late"] is not None, "a rank that others wait for in vain is waited for on")
        require_same("the ranks that it names who has waited", waiting["late"], [LATE])
        seconds = waiting["seconds"]
        require(seconds < 20.0, f"timeout_seconds is 2, and it was waited for {seconds:.1f} s")
    require(late["late"] is not None, "the late rank finds the others gone, and does not fail")
    require(not {*late["late"]} - {LATE}, "the late rank names one that had waited for it")
    return None


@check()
def one_rank_gives_up(subject: Subject) -> None:
    """Require that ranks may go on after all of them abort. After one rank alone aborts, the
    others end within seconds, by an error that names it and says why. This applies to drivers that
    promise `stall_seconds`.
    """
    if not (subject.can("multi_process") and subject.can("stall_seconds")):
        return
    with tempfile.TemporaryDirectory() as folder:
        reported = subject.at(2).run(
            gives_up, alone=True, folder=folder, longest=40.0, timeout_seconds=10.0
        )
    together = [each["together"] for each in reported]
    require_same("all abort, and may resume", together, [True] * len(reported))
    require(not reported.pop(LATE)["resumes"], "a rank that aborts alone may not resume")
    for other in reported:
        require(other["error"], "a rank that others wait for has given up, and they wait on")
        require(WHY in other["error"], f"why rank {LATE} aborted is not said: {other['error']}")
        require_same("the ranks that it names who has waited", other["late"], [LATE])
        seconds = other["seconds"]
        require(seconds < 15.0, f"the others end {seconds:.1f} s after a rank has given up")


@check()
def compilation(subject: Subject) -> Refused | None:
    """Require the same losses from a compiled model, and that a hook is called which only one of
    several layers of a class has.
    """
    if not subject.can("compile"):
        return refuses(subject, "compile", "compile", {"compile": True})
    seen = rehearse(subject, "regression", optimizer="SGD", groups=[[0, 1, 2, 3]] * 2, compile=True)
    seen.require_losses(1e-5)
    problem = problem_for(subject, "language")
    # traced as it is for machine code, which takes much longer to make
    compiled = {"compile": True, "compile_options": {"backend": "aot_eager"}}
    calls = [
        max(subject.run(forwards, problem=problem, settings=settings, layer=-1))
        for settings in ({}, compiled)
    ]
    require_same("calls of a hook on the last of several layers", calls[1], calls[0])
    return None


@check()
def activation_checkpointing(subject: Subject) -> Refused | None:
    """Require that the chosen layers run once more in the backward, with the same losses."""
    problem = problem_for(subject, "language")
    layer = PROBLEMS[problem].trained_layer
    asked: dict[str, Any] = {"activation_checkpointing": (layer,)}
    if not subject.can("activation_checkpointing"):
        return refuses(subject, "activation_checkpointing", "activation_checkpointing", asked)
    rehearse(subject, problem, optimizer="SGD", steps=3, **asked).require_losses(1e-6)
    runs = (subject.run(forwards, problem=problem, settings=settings) for settings in ({}, asked))
    plain, again = map(max, runs)
    require_same("forwards of a recomputed layer, for one of a plain one", again / plain, 2.0)
    return None


@check()
def feeds_ahead(subject: Subject) -> None:
    """Require that one batch is pulled ahead at most, and none unless `feeds_ahead` is declared."""
    allowed = int(subject.can("feeds_ahead"))
    ahead = max(subject.run(batches_ahead))
    require(ahead <= allowed, f"feed pulls {ahead} batches ahead; declared: {allowed}")


@check()
def sharded(subject: Subject) -> None:
    """Require that no rank holds all weights where `sharded` is declared, and that each rank holds
    all of them where it is not. Options may ask for as many copies as there are ranks: then twice
    as many ranks are tried.
    """
    problem = problem_for(subject, "language")
    held = subject.run(weights_held, problem=problem)
    whole = sum(p.numel() for p in PROBLEMS[problem].model().parameters())
    if subject.can("sharded") and len(held) > 1 and max(held) == whole:
        held = subject.at(2 * subject.world).run(weights_held, problem=problem)
    if not subject.can("sharded"):
        require_same("weights held by each rank", held, [whole] * len(held))
    elif len(held) > 1:
        require(max(held) < whole, f"sharded, but each rank holds all {whole} weights: {held}")


@check()
def looking_changes_nothing(subject: Subject) -> None:
    """Call `probe` and `capabilities` twice; require the same answers. They may touch no process
    group, device, random number or variable of the environment. Options must be a frozen dataclass
    with defaults.
    """
    for changed in subject.run(traces_of_looking):
        require_same("traces of looking at the driver", changed, [])


def late_ranks_reported(
    bench: Bench, *, folder: str, longest: float, **settings: Any
) -> dict[str, Any]:
    """Job in which one rank sleeps, while the others add up, until all have reported it. Returns
    the reported ranks, and the sums.
    """
    late: set[int] = set()

    def note(rank: int, seconds: float, what: str) -> None:
        late.add(rank)
        Path(folder, f"reported {session.world.rank}").touch()

    with bench.open(**settings) as session:
        cast(WatchesRanks, session).watch(note)
        session.tally([1.0])()
        if session.world.rank == LATE:
            nap_until([f"reported {rank}" for rank in range(session.world.size)], folder, longest)
        sums = session.tally([1.0])()
        session.exchange(None)
    return {"late": sorted(late), "sums": sums}


def nap_until(names: Sequence[str], folder: str, longest: float) -> None:
    """Sleep until the folder has files of these names, at most `longest` seconds."""
    end = time.monotonic() + longest
    while time.monotonic() < end and not all(Path(folder, name).exists() for name in names):
        time.sleep(0.01)


def late_ranks_blamed(
    bench: Bench, *, folder: str, longest: float, **settings: Any
) -> dict[str, Any]:
    """Job in which one rank sleeps until all others have given up. Returns the ranks that the error
    names (None without an error), and the seconds until then.
    """
    late, rank, began = None, LATE, time.monotonic()
    with suppress(CollectiveFailed), bench.open(**settings) as session:
        session.exchange(None)
        rank, began = session.world.rank, time.monotonic()
        if rank == LATE:
            others = {*range(session.world.size)} - {LATE}
            nap_until([f"given up {other}" for other in others], folder, longest)
        try:
            session.tally([1.0])()
        except CollectiveFailed as error:
            late = list(error.late)
            raise
    seconds = time.monotonic() - began
    Path(folder, "came" if rank == LATE else f"given up {rank}").touch()
    nap_until(["came"], folder, longest + 3.0)  # who leaves takes the store along
    return {"late": late, "seconds": seconds}


WHY = "its third sample is bad"


def gives_up(bench: Bench, *, folder: str, longest: float, **settings: Any) -> dict[str, Any]:
    """Job in which all ranks abort and resume, then one rank aborts and ends. Returns the error
    that each rank receives, and the seconds until then.
    """
    reported: dict[str, Any] = {"error": "", "late": [], "resumes": False}
    with suppress(CollectiveFailed), bench.open(**settings) as session:
        rank, size, watched = session.world.rank, session.world.size, cast(WatchesRanks, session)
        reported["together"] = watched.abort("no memory")
        session.tally([1.0])()
        began = time.monotonic()
        try:
            if rank == LATE:
                reported["resumes"] = watched.abort(f"rank {rank} ends: {WHY}", retry=False)
                raise CollectiveFailed("as an error ends it")
            session.tally([1.0])()
        except CollectiveFailed as error:
            reported |= {"error": str(error), "late": list(error.late)}
            raise
        finally:
            reported["seconds"] = time.monotonic() - began
    Path(folder, f"ended {rank}").touch()
    # who leaves takes the store along
    nap_until([f"ended {each}" for each in range(size)], folder, longest)
    return reported


def world_of(bench: Bench, *, launched: bool = True) -> dict[str, int]:
    """Job that returns this process's place in its world."""
    kept = {} if launched else {name: os.environ.pop(name) for name in LAUNCHERS}
    with ExitStack() as stack:
        stack.callback(os.environ.update, kept)
        session = stack.enter_context(bench.open())
        world = session.world
        return {
            "rank": world.rank,
            "size": world.size,
            "readers": world.num_readers,
            "feeders": world.num_feeders,
        }


def forwards(bench: Bench, *, problem: str, settings: dict[str, Any], layer: int = 0) -> int:
    """Job that counts by a hook the forwards of a layer in one update; `layer`: that of which of
    the blocks.
    """
    count = 0

    def counted(*args: object) -> None:
        nonlocal count
        count += torch.is_grad_enabled()  # a driver may look at the loss before it trains

    def model() -> nn.Module:
        built = PROBLEMS[problem].model()
        norms = [part for name, part in built.named_modules() if name.endswith("attention_norm")]
        norms[layer].register_forward_pre_hook(counted)
        return built

    PROBLEMS["counted"] = dataclasses.replace(PROBLEMS[problem], model=model)
    try:
        train(bench, problem="counted", groups=[range(6)], rates=[0.1], optimizer="SGD", **settings)
    finally:
        del PROBLEMS["counted"]
    return count


def batches_ahead(bench: Bench) -> int:
    """Job that returns the largest number of batches that `feed` had pulled ahead."""
    pulled = 0

    def source() -> Iterator[Sample]:
        nonlocal pulled
        for batch in microbatches(PROBLEMS["regression"], [partition(range(3), 0, 1, None)] * 5):
            pulled += 1
            yield batch

    with bench.open() as session:
        fed = session.feed(source())
        before = [pulled]
        for index, _ in enumerate(fed):
            before.append(pulled - index - 1)
    return max(before)


def weights_held(bench: Bench, *, problem: str) -> int:
    """Job that counts the elements of the parameters in this rank's memory."""
    with bench.open() as session:
        engine = session.prepare(PROBLEMS[problem].recipe(optimizer=optimizer_called("SGD")))
        parts = [local(parameter) for parameter in engine.module.parameters()]
        in_memory = (part.untyped_storage().nbytes() // part.element_size() for part in parts)
        return sum(min(part.numel(), n) for part, n in zip(parts, in_memory, strict=True))


def local(parameter: Tensor) -> Tensor:
    to_local = getattr(parameter, "to_local", None)
    part: Tensor = parameter if to_local is None else to_local()
    return part


def traces_of_looking(bench: Bench) -> list[str]:
    """Job that names what `probe` and `capabilities` have changed."""
    driver, plan = bench.driver, bench.plan()

    def world() -> dict[str, Any]:
        return {
            "environment": dict(os.environ),
            "python's random state": random.getstate(),
            "torch's random state": torch.get_rng_state().tolist(),
            "process group": dist.is_available() and dist.is_initialized(),
            "device": torch.cuda.is_initialized(),  # type: ignore[no-untyped-call]
            "threads": torch.get_num_threads(),
        }

    before = world()
    reported = [(driver.probe(), driver.capabilities(plan)) for _ in range(2)]
    after = world()
    changed = [name for name in before if before[name] != after[name]]
    if reported[0] != reported[1]:
        changed.append("the answers")
    parameters = getattr(driver.options_type, "__dataclass_params__", None)
    if parameters is None or not parameters.frozen or driver.options_type() is None:
        changed.append("options_type is no frozen dataclass with defaults")
    return changed
