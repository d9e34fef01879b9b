"""The session. Ranks exchange tensors, are fed batches, and draw random numbers as promised."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .bench import Bench
from .cases import check
from .jobs import optimizer_called
from .judge import require, require_same, require_same_bits
from .problems import PROBLEMS
from .refusal import problem_for
from .state import assemble, pieces
from .subject import Subject


@check()
def ranks_tell_each_other(subject: Subject) -> None:
    """Require that `tally` adds up exactly, also with two tallies under way, and that `exchange`
    keeps rank order.
    """
    ranks = subject.run(talk)
    size = len(ranks)
    total = float(sum(range(size)))
    for rank in ranks:
        require_same("tally", rank["tally"], [size * 2.0**52, total, size * 0.5])
        require_same("second tally", rank["second"], [float(size)])
        values = [{"rank": index, "text": "é", "none": None} for index in range(size)]
        require_same("exchange", rank["exchanged"], values)


def talk(bench: Bench) -> dict[str, Any]:
    """Job that tallies twice and exchanges a value."""
    with bench.open() as session:
        rank = session.world.rank
        first = session.tally([2.0**52, rank, 0.5])
        second = session.tally([1])
        return {
            "tally": first(),
            "second": second(),
            "exchanged": session.exchange({"rank": rank, "text": "é", "none": None}),
        }


@check(dtype=("float32", "float64", "int64", "bool"))
def tensors_are_reduced_and_gathered(subject: Subject, dtype: str) -> None:
    """Require right results over feeders, and an input left as it was. Gathered parts may differ in
    length, or be empty.
    """
    ranks = subject.run(collect, dtype=dtype)
    feeders = ranks[0]["feeders"]
    kind = getattr(torch, dtype)
    stacked = torch.stack([numbers(feeder).to(kind) for feeder in range(feeders)])
    expected = {"gathered": torch.cat([part(feeder).to(kind) for feeder in range(feeders)])}
    if dtype != "bool":
        expected |= {"sum": stacked.sum(0), "max": stacked.amax(0), "min": stacked.amin(0)}
    for rank in ranks:
        require_same_bits("reduced and gathered", rank["results"], expected)
        own = {"input": numbers(rank["feeder"]).to(kind)}
        require_same_bits("what was given", {"input": rank["input"]}, own)


def numbers(feeder: int) -> Tensor:
    sign = -1.0 if feeder % 2 else 1.0
    return torch.arange(6.0).view(2, 3) * sign + feeder


def part(feeder: int) -> Tensor:
    """The part to gather: no row from the first feeder, one from the next, and so on."""
    return torch.full((feeder, 2), feeder + 1)


def collect(bench: Bench, *, dtype: str) -> dict[str, Any]:
    """Job that gathers a part, and reduces a tensor by each operation."""
    kind = getattr(torch, dtype)
    with bench.open() as session:
        world = session.world
        device = world.device if kind != torch.float64 else world.sums_on or world.device
        given = numbers(world.feeder_index).to(device, kind)
        results = {"gathered": session.gather(part(world.feeder_index).to(device, kind))}
        if dtype != "bool":
            results |= {op: session.reduce(given, op).cpu() for op in ("sum", "max", "min")}
        return {
            "feeders": world.num_feeders,
            "feeder": world.feeder_index,
            "results": results,
            "input": given.cpu(),
        }


class Pair(NamedTuple):
    """A tuple with named fields, which a batch may be."""

    first: Any
    second: Any


@check()
def batches_are_fed_in_order(subject: Subject) -> None:
    """Require every batch, in order and in its own structure. An error of the source is raised
    unchanged, after the batches before it.
    """
    for rank in subject.run(feeding):
        require_same("batches", rank["values"], list(range(5)))
        require(rank["structure"], "a batch came out in another structure")
        require(rank["on_device"], "a tensor of a batch is not on the device")
        require_same("batches before the error", rank["before"], [0, 1])
        require(rank["error"], "the error of the source came through changed")


def feeding(bench: Bench) -> dict[str, Any]:
    """Job that feeds two sources, of which the second one raises."""
    error = LookupError("of the source")

    def source(size: int, fails: bool) -> Iterator[Any]:
        for index in range(size):
            x = torch.full((2,), float(index))
            yield {"x": x, "more": [x, (x, "text")], "pair": Pair(x, 3), "none": None}
        if fails:
            raise error

    with bench.open() as session:
        batches = list(session.feed(source(5, False)))
        before, caught = [], None
        try:
            for batch in session.feed(source(2, True)):
                before.append(int(batch["x"][0]))
        except LookupError as raised:
            caught = raised
        device = session.world.device.type
        more = [b["more"] for b in batches]
        return {
            "values": [int(batch["x"][0]) for batch in batches],
            "structure": all(
                type(batch["pair"]) is Pair
                and batch["pair"].second == 3
                and batch["none"] is None
                and batch["more"][1][1] == "text"
                for batch in batches
            ),
            "on_device": all(m[0].device.type == m[1][0].device.type == device for m in more),
            "before": before,
            "error": caught is error,
        }


@check()
def random_state_can_be_put_back(subject: Subject) -> None:
    """Require that Python's, torch's, NumPy's and the device's generators repeat their numbers
    after the state is put back. Equal seeds give equal numbers, and the state is made of host
    tensors.
    """
    for rank in subject.run(drawing):
        require_same("numbers after putting the state back", rank["again"], rank["first"])
        require_same("numbers after seeding again", rank["reseeded"], rank["seeded"])
        require(rank["first"] != rank["seeded"], "other numbers were drawn in between")
        require(rank["on_host"], "the random state is not made of host tensors")


def drawing(bench: Bench) -> dict[str, Any]:
    """Job that draws numbers, puts the state back, and draws again."""
    import numpy  # before the session: what the process uses is seeded

    with bench.open() as session:
        device = session.world.device

        def draw() -> list[float]:
            # one normal number leaves half a pair behind in Python's and NumPy's generators
            host = [random.random(), random.gauss(0, 1), float(torch.rand(())), numpy.random.rand()]
            return [*host, numpy.random.randn(), float(torch.rand((), device=device))]

        session.seed(5)
        seeded = draw()
        state = session.rng_state()
        first = draw()
        draw()
        session.set_rng_state(state)
        again = draw()
        session.seed(5)
        return {
            "seeded": seeded,
            "first": first,
            "again": again,
            "reseeded": draw(),
            "on_host": all(tensor.device.type == "cpu" for tensor in state.values()),
        }


@check()
def a_damaged_random_state_is_refused_before_anything_changes(subject: Subject) -> None:
    """Require `CheckpointDamaged` for an entry of another form or name. A missing entry may be
    accepted, but must not raise any other error.
    """
    for rank in subject.run(putting_back_damage):
        for entry, reported in {**rank["renamed"], **rank["malformed"]}.items():
            require_same(
                f"error for the random state {entry!r}", reported["error"], "CheckpointDamaged"
            )
            require(entry in reported["message"], f"the error does not name {entry!r}: {reported}")
        for entry, reported in rank["missing"].items():
            require(
                reported["error"] in ("", "CheckpointDamaged"),
                f"without the random state {entry!r}: {reported['error']}: {reported['message']}",
            )
        require(rank["unchanged"], "a generator was changed before the error")


def putting_back_damage(bench: Bench) -> dict[str, Any]:
    """Job that puts back damaged states, and returns the errors by entry."""
    with bench.open() as session:
        session.seed(5)
        session.tally([1])()
        state = session.rng_state()
        random.gauss(0, 1), torch.rand(())
        before = session.rng_state()
        unchanged = True

        def put(damaged: dict[str, Tensor]) -> dict[str, str]:
            nonlocal unchanged
            try:
                session.set_rng_state(damaged)
            except Exception as error:
                now = session.rng_state()
                unchanged &= all(torch.equal(now[name], before[name]) for name in before)
                return {"error": type(error).__name__, "message": str(error)}
            session.set_rng_state(before)
            return {"error": "", "message": ""}

        def without(name: str) -> dict[str, Tensor]:
            return {other: tensor for other, tensor in state.items() if other != name}

        return {
            "missing": {name: put(without(name)) for name in state},
            "renamed": {
                f"no {name}": put({**without(name), f"no {name}": state[name]}) for name in state
            },
            "malformed": {
                name: put({**state, name: torch.full((2, 3), 1e300, dtype=torch.float64)})
                for name in state
            },
            "unchanged": unchanged,
        }


@check()
def sessions_can_follow_each_other(subject: Subject) -> None:
    """Require that sessions opened one after the other in the same processes all work, as a search
    over settings needs.
    """
    for rank in subject.run(reopening):
        require_same("sums in five sessions", rank, [float(subject.world)] * 5)


def reopening(bench: Bench) -> list[float]:
    """Job that opens five sessions. The first rank lingers in each: others may be in the next one
    already.
    """
    sums = []
    for _ in range(5):
        with bench.open() as session:
            sums += session.tally([1])()
            if session.world.rank == 0:
                time.sleep(0.05)
    return sums


@check()
def model_is_built_under_the_seed(subject: Subject) -> None:
    """Require on every rank the initial weights that the seed gives in plain PyTorch."""
    problem = problem_for(subject, "language")
    torch.manual_seed(11)
    expected = PROBLEMS[problem].model()
    weights = assemble(subject.run(building, problem=problem, seed=11))["weights"]
    require_same_bits(
        "initial weights", weights, {n: p.detach() for n, p in expected.named_parameters()}
    )


def building(bench: Bench, *, problem: str, seed: int) -> list[dict[str, Any]]:
    """Job that returns the initial weights."""
    recipe = PROBLEMS[problem].recipe(optimizer=optimizer_called("SGD"))
    with bench.open(seed=seed) as session:
        return pieces(session.prepare(recipe))
