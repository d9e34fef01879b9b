"""The account of a run's time: planted slownesses are named with their share, and nothing else."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from drivetrain import Recipe, Settings
from drivetrain.checkpoint import CheckpointStore
from drivetrain.kernel.batches import Position
from drivetrain.kernel.events import Event, Logged, RunEnded, StepEnded
from drivetrain.trainer.fit import fit
from drivetrain.trainer.setting_values import override
from drivetrain.trainer.step_clock import PARTS, StepClock
from drivetrain.trainer.time_accounting import TimeAccounting, TimeSpent
from drivetrain.trainer.time_verdicts import Spent, Synchronisation, Verdict, verdicts

STEPS, BATCH = 30, 4
FORWARD = 0.008


class World:
    """A clock that only what is planted moves, so that a busy machine changes nothing."""

    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        self.at += seconds


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(time, "perf_counter", made.now)
    return made


class Rows(torch.utils.data.Dataset[Tensor]):
    """Rows whose fetching takes so long."""

    def __init__(self, sleep: Callable[[float], None] = time.sleep, seconds: float = 0.0) -> None:
        self.sleep, self.seconds = sleep, seconds

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> Tensor:
        if self.seconds:
            self.sleep(self.seconds)
        return torch.full((4,), index / 1000)


class Seen:
    """Keeps the events of a run, and the time of its steps after the first."""

    def __init__(self) -> None:
        self.events: list[Event | TimeSpent] = []
        self.at: list[float] = []

    def __call__(self, event: Event | TimeSpent) -> None:
        self.events.append(event)
        if isinstance(event, StepEnded):
            self.at.append(time.perf_counter())

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def spent(self) -> TimeSpent:
        found: TimeSpent = self.of(TimeSpent)[-1]
        return found

    @property
    def seconds(self) -> float:
        return self.at[-1] - self.at[0]

    def only(self, kind: str) -> Mapping[str, Any]:
        (verdict,) = self.spent.verdicts
        assert verdict["kind"] == kind
        return verdict


def run(
    sleep: Callable[[float], None],
    recipe: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    out: Path | None = None,
    observers: tuple[Callable[[Any], None], ...] = (),
) -> Seen:
    def loss(module: nn.Module, batch: Tensor) -> Tensor:
        sleep(FORWARD)
        result: Tensor = module(batch).square().sum()
        return result

    parts = {"loss": loss, "train_data": Rows(), **(recipe or {})}
    given = {"steps": STEPS, "global_batch": BATCH, "evaluate.sanity_check": False, "log_every": 5}
    seen = Seen()
    fit(
        Recipe(model=lambda: nn.Linear(4, 1), **parts),
        override(Settings(), {**given, "checkpoint.at_end": False, **(settings or {})}),
        backend="cpu",
        out=out,
        observers=[seen, *observers],
    )
    return seen


def test_a_clean_run_has_no_verdict_and_its_parts_are_its_time(world: World) -> None:
    seen = run(world.sleep, settings={"steps": 40, "log_every": 4})
    assert not seen.spent.verdicts
    assert not seen.spent.news
    logged = seen.of(Logged)
    added = sum(sum(each.parts.values()) for each in logged) + sum(seen.spent.rest.values())
    assert added == pytest.approx(world.at)
    assert {part for each in logged for part in each.parts} <= set(PARTS)
    assert logged[-1].parts == pytest.approx({"compute": 4 * FORWARD})
    assert seen.spent.steps == 39
    assert isinstance(seen.events[-1], RunEnded)


def test_parts_of_a_real_run_add_up_to_its_time() -> None:
    began = time.perf_counter()
    seen = run(time.sleep)
    wall = time.perf_counter() - began
    added = sum(sum(each.parts.values()) for each in seen.of(Logged))
    assert seen.seconds * 0.99 <= added + sum(seen.spent.rest.values()) <= wall


def test_slow_samples_are_named_with_the_workers_that_end_it(world: World) -> None:
    seen = run(world.sleep, {"train_data": Rows(world.sleep, 0.003)})
    verdict = seen.only("input")
    assert verdict["share"] == pytest.approx(0.6)
    assert verdict["text"] == (
        "60 % of the time training waits for data: no worker, each sample takes 3 ms; "
        "`data.workers=2` should end it"
    )
    assert [bool(each.news) for each in seen.of(TimeSpent)] == [True, False]


def test_a_slow_collate_is_named(world: World) -> None:
    def collate(samples: list[Tensor]) -> Tensor:
        world.sleep(0.006)
        made: Tensor = default_collate(samples)
        return made

    verdict = run(world.sleep, {"collate": collate}).only("collate")
    assert verdict["share"] == pytest.approx(6 / 14)
    assert (
        "no worker, `collate` takes 6 ms a batch, 100 % of the time of fetching" in verdict["text"]
    )


def test_too_few_workers_are_named() -> None:
    seen = run(time.sleep, {"train_data": Rows(seconds=0.012)}, {"data.workers": 1})
    verdict = seen.only("workers")
    measured = re.search(r"1 worker, each sample takes (\d+) ms", verdict["text"])
    assert measured and int(measured[1]) >= 12  # a busy machine sleeps longer
    assert "`data.workers=" in verdict["text"]


def test_a_slow_evaluation_is_named(world: World) -> None:
    def measure(module: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        world.sleep(0.02)
        return {"loss": module(batch).square().sum()}

    data = {"eval_data": {"held out": torch.utils.data.Subset(Rows(), range(4))}}
    settings = {"evaluate.every": 4, "evaluate.at_end": False}
    verdict = run(world.sleep, {**data, "measure": measure}, settings).only("evaluation")
    assert verdict["share"] == pytest.approx(7 * 0.02 / (7 * 0.02 + 29 * FORWARD))
    assert "20 ms each time; raise `evaluate.every`" in verdict["text"]


def test_a_slow_save_is_named(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = CheckpointStore.save

    def slowly(self: CheckpointStore, *args: Any, **kwargs: Any) -> Any:
        world.sleep(0.05)
        return save(self, *args, **kwargs)

    monkeypatch.setattr(CheckpointStore, "save", slowly)
    settings = {"checkpoint.every": 10}
    verdict = run(world.sleep, settings=settings, out=tmp_path / "run").only("saving")
    assert verdict["share"] == pytest.approx(3 * 0.05 / (3 * 0.05 + 29 * FORWARD))
    assert "50 ms each time" in verdict["text"]
    assert "`checkpoint.background=true`" in verdict["text"]


def test_a_slow_observer_is_named(world: World) -> None:
    def draws(event: Event) -> None:
        if isinstance(event, StepEnded):
            world.sleep(0.005)

    verdict = run(world.sleep, observers=(draws,)).only("observer")
    assert verdict["share"] == pytest.approx(5 / 13, abs=0.01)
    assert "mostly `draws`, 5" in verdict["text"]


def test_an_observer_without_a_hash_can_be_timed(world: World) -> None:
    @dataclasses.dataclass
    class Draws:
        seconds: float

        def __call__(self, event: Event) -> None:
            if isinstance(event, StepEnded):
                world.sleep(self.seconds)

    verdict = run(world.sleep, observers=(Draws(0.005),)).only("observer")
    assert "mostly `Draws`" in verdict["text"]


def test_lines_that_wait_for_the_device_are_found_on_request(world: World) -> None:
    def waits(module: nn.Module, batch: Tensor) -> Tensor:
        world.sleep(FORWARD)
        result: Tensor = module(batch).square().sum()
        result.item()
        return result

    line = waits.__code__.co_firstlineno + 3
    assert not run(world.sleep, {"loss": waits}).spent.verdicts
    settings = {"find_synchronisations": True}
    verdict = run(world.sleep, {"loss": waits}, settings).only("synchronisation")
    assert verdict["text"].startswith(
        f"test_time_spent.py:{line} waits for the device, once a step, "
    )


def test_the_time_is_judged_at_a_few_logs_and_reported_once(world: World) -> None:
    data = {"train_data": Rows(world.sleep, 0.003)}
    seen = run(world.sleep, data, {"log_every": 4, "steps": 40}).of(TimeSpent)
    assert [each.step for each in seen] == [16, 32, 40]
    assert [bool(each.news) for each in seen] == [True, False, False]
    assert [len(each.verdicts) for each in seen] == [1, 1, 1]


# --- the clock, and the sentences -------------------------------------------------------------


def test_each_second_of_a_clock_belongs_to_one_part(world: World) -> None:
    clock = StepClock()
    clock.mark("data")
    world.sleep(1.0)
    with clock.within("saving"):
        world.sleep(2.0)
    assert clock.part == "data"
    clock.mark("compute")
    world.sleep(4.0)
    assert clock.take() == {"data": 1.0, "saving": 2.0, "compute": 4.0}
    assert clock.take() == {}
    assert clock.totals()["saving"] == 2.0


def test_waits_for_other_ranks_are_taken_out_of_the_parts_of_a_step(world: World) -> None:
    session: Any = SimpleNamespace(world=SimpleNamespace(size=2), waited_seconds=10.0)
    clock = StepClock()
    clock.watch(session)
    for part, seconds, waited in (("compute", 5.0, 2.0), ("saving", 3.0, 3.0), ("data", 1, 1.5)):
        clock.mark(part)
        world.sleep(seconds)
        session.waited_seconds += waited
    assert clock.take() == {"compute": 3.0, "ranks": 3.0, "saving": 3.0}


def spent(**values: Any) -> Spent:
    made = Spent(steps=100, seconds={"compute": 9.0})
    return dataclasses.replace(made, **values)


def kinds(found: list[Verdict]) -> list[str]:
    return [verdict.kind for verdict in found]


def test_a_share_is_of_the_time_without_starting() -> None:
    (verdict,) = verdicts(spent(seconds={"compute": 6.9, "data": 3.1, "starting": 90.0},
                                workers=2, cores=8, samples=800, fetch_seconds=20.0,
                                collate_seconds=0.4))  # fmt: skip
    assert verdict.text == (
        "31 % of the time training waits for data: 2 workers, each sample takes 26 ms; "
        "`data.workers=3` should end it"
    )


def test_a_moment_or_a_few_steps_are_not_judged() -> None:
    assert not verdicts(spent(seconds={"compute": 0.1, "data": 0.09}))
    assert not verdicts(spent(seconds={"compute": 1.0, "data": 9.0}, steps=4))
    assert not verdicts(spent(seconds={"compute": 9.5, "data": 0.5}))
    assert not verdicts(Spent(0, {}))


def test_a_machine_that_stops_for_a_moment_is_no_slow_loader() -> None:
    waits = spent(seconds={"compute": 5.0, "data": 2.0}, longest_waits=(0.6, 0.7, 0.6))
    assert not verdicts(waits)
    assert kinds(verdicts(dataclasses.replace(waits, longest_waits=(0.3, 0.3, 0.3)))) == ["input"]
    each_step = spent(steps=5, seconds={"compute": 5.0, "data": 2.0}, longest_waits=(0.4,) * 3)
    assert kinds(verdicts(each_step)) == ["input"]


def test_a_loader_that_stalls_twice_is_not_slow_but_one_that_stalls_often_is(world: World) -> None:
    def stalls(every: int) -> list[str]:
        class Stalling(Rows):
            def __getitem__(self, index: int) -> Tensor:
                self.fetched = getattr(self, "fetched", 0) + 1
                if self.fetched % (every * BATCH) == 0:
                    world.sleep(0.1)
                return super().__getitem__(index)

        found = run(world.sleep, {"train_data": Stalling()}).spent.verdicts
        return [verdict["kind"] for verdict in found]

    assert stalls(STEPS // 2) == []
    assert stalls(4) == ["input"]


def test_what_comes_after_the_last_batch_is_no_wait_for_data(world: World) -> None:
    class Closing:
        def groups(self, start: Position, num_steps: int) -> Iterator[Any]:
            for number in range(num_steps):
                world.sleep(1.0)
                yield number
            world.sleep(100.0)

    clock: Any = StepClock()
    clock.mark("data")
    accounting = TimeAccounting(clock, SimpleNamespace(), None, Settings())  # type: ignore[arg-type]
    given: Any = accounting.watched(Closing())
    assert list(given.groups(Position(), 3)) == [0, 1, 2]
    assert clock.take() == {"update": 103.0}
    clock.mark("data")
    for _ in given.groups(Position(), 3):
        clock.mark("compute")
        clock.mark("data")
    assert clock.take() == {"data": 3.0, "update": 100.0}


def test_more_workers_than_cores_are_advised_with_a_condition() -> None:
    (verdict,) = verdicts(spent(seconds={"compute": 1.0, "data": 9.0}, samples=100, cores=2))
    assert verdict.text.endswith(
        "`data.workers=9` should end it, if samples mostly wait for files or servers: there are 2 "
        "cores"
    )


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"data": "batches"}, "its own loader"),
        ({"data": "stream"}, "a stream, read by no worker; `data.workers=1`"),
        ({"data": "stream", "workers": 1}, "a stream, read by 1 worker; a stream has one reader"),
    ],
)
def test_the_remedy_fits_the_kind_of_data(values: dict[str, Any], text: str) -> None:
    (verdict,) = verdicts(spent(seconds={"compute": 5.0, "data": 5.0}, **values))
    assert verdict.kind == "input"
    assert text in verdict.text


def test_a_slow_rank_is_one_that_others_wait_for() -> None:
    quick = {"compute": 7.0, "data": 0.5, "ranks": 2.5}
    slow = {"compute": 9.2, "data": 0.6, "ranks": 0.2}
    (verdict,) = verdicts(spent(seconds=quick, ranks=[quick, slow, quick]))
    assert verdict.kind == "rank"
    assert verdict.text.startswith(
        "rank 1 is slower than the others, which wait for it 23 % of the time: it takes 22 ms a "
        "step more in forward and backward"
    )
    assert not verdicts(spent(seconds=quick, ranks=[quick, quick]))
    alone = {**slow, "compute": 12.0, "ranks": 2.5}  # nobody waits longer for it
    assert not verdicts(spent(seconds=quick, ranks=[quick, alone]))


def test_several_are_sorted_by_share() -> None:
    found = verdicts(
        spent(
            seconds={"compute": 4.0, "evaluation": 2.0, "saving": 3.0, "copy": 1.1},
            evaluations=2,
            saves=3,
            saves_in_background=True,
            synchronisations=[Synchronisation("a.py:3", 200, 0.5), Synchronisation("b.py:1", 3, 1)],
        )
    )
    assert kinds(found) == ["saving", "evaluation", "copy", "synchronisation"]
    assert "background" not in found[0].text
    assert found[-1].text.startswith("a.py:3 waits for the device, 2 times a step, 5 % of")
