"""`fit` on streams and ready batches has the curve of map-style data, also when resumed, and until
the data end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from trainer.problems import Pairs, recipe

from drivetrain import Batches, DataSettings, ScheduleSettings, Settings
from drivetrain.checkpoint import CheckpointReader
from drivetrain.kernel.errors import DataError, SettingError
from drivetrain.kernel.events import Event, Logged, RunStarted, Warned
from drivetrain.trainer.fit import fit

CONSTANT = Settings(
    epochs=2,
    global_batch=8,
    micro_batch=3,
    log_every=1,
    schedule=ScheduleSettings("constant"),
    data=DataSettings(shuffle=False),
)


class Rows:
    """The samples of `Pairs` as a stream, with or without a state."""

    def __init__(self, num_samples: int = 50) -> None:
        self.pairs = Pairs(num_samples)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.pairs[index] for index in range(len(self.pairs)))


class StatefulRows(Rows):
    at = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        start, self.at = self.at, 0
        for index in range(start, len(self.pairs)):
            self.at = index + 1
            yield self.pairs[index]
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def run(data: Any, settings: Settings = CONSTANT, **options: Any) -> tuple[Any, list[Event]]:
    events: list[Event] = []
    what = dataclasses.replace(recipe(dropout=0.2), train_data=data)
    result = fit(what, settings, backend="cpu", observers=[events.append], **options)
    return result, events


def losses(events: list[Event]) -> list[float]:
    return [event.loss for event in events if isinstance(event, Logged)]


def weights(path: Path | None) -> dict[str, Tensor]:
    assert path is not None
    reader = CheckpointReader(path)
    return {name: reader.read("weights", name) for name in reader.names("weights")}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_trains_as_the_data_set_would(workers: int) -> None:
    settings = dataclasses.replace(CONSTANT, data=DataSettings(shuffle=False, workers=workers))
    result, events = run(Rows(), settings)
    assert result.step == 14
    assert losses(events) == losses(run(Pairs(50))[1])
    (started,) = (event for event in events if isinstance(event, RunStarted))
    assert (started.total_steps, started.steps_per_epoch, started.num_samples) == (None,) * 3
    assert [event.epoch for event in events if isinstance(event, Logged)] == [0] * 6 + [1] * 7 + [2]


def test_ready_batches_train_as_they_come() -> None:
    loader = DataLoader(Pairs(50), batch_size=8)
    result, events = run(Batches(loader))
    settings = dataclasses.replace(CONSTANT, micro_batch=8)
    assert losses(events) == losses(run(Pairs(50), settings)[1])
    assert result.step == 14
    (started,) = (event for event in events if isinstance(event, RunStarted))
    assert (started.total_steps, started.steps_per_epoch) == (14, 7)


DATA: dict[str, Callable[[], Any]] = {
    "plain": Rows,
    "stateful": StatefulRows,
    "function": lambda: lambda: iter(Rows()),
    "ready": lambda: Batches(DataLoader(Pairs(50, noise=0.1), batch_size=3, shuffle=True), 3),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("stops", [[3], [2, 8], [1, 2, 5, 7, 11]])
def test_a_resumed_run_is_bit_exact(kind: str, stops: list[int], tmp_path: Path) -> None:
    whole, _ = run(DATA[kind](), dataclasses.replace(CONSTANT, steps=13), out=tmp_path / "whole")
    for stop in [*stops, 13]:
        settings = dataclasses.replace(CONSTANT, steps=stop)
        result, _ = run(DATA[kind](), settings, out=tmp_path / "parts", resume="auto")
    expected, found = weights(whole.checkpoint), weights(result.checkpoint)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_steps_continue_through_epochs_and_end_with_the_data() -> None:
    settings = dataclasses.replace(CONSTANT, steps=9)
    result, events = run(Rows(20), settings)
    assert (result.step, result.reason) == (9, "finished")
    result, events = run(iter(Rows(20)), settings)
    assert (result.step, result.reason) == (3, "finished")
    (warned,) = (event for event in events if isinstance(event, Warned))
    assert warned.message == "the data ended after 3 of 9 steps"


def test_evaluation_takes_streams_and_batches_too() -> None:
    metrics = []
    for held_out in (Pairs(13), Rows(13), Batches(DataLoader(Pairs(13), batch_size=4))):
        what = dataclasses.replace(recipe(), eval_data={"held_out": held_out})
        settings = dataclasses.replace(CONSTANT, steps=3)
        metrics.append(fit(what, settings, backend="cpu").metrics["held_out"]["loss"])
    assert metrics[1:] == pytest.approx([metrics[0]] * 2, rel=1e-6)


class OddState(StatefulRows):
    def state_dict(self) -> dict[str, Any]:
        return {"rng": torch.zeros(3)}


@pytest.mark.parametrize(
    ("data", "changes", "error", "message"),
    [
        (
            Rows(),
            {"schedule": ScheduleSettings("cosine")},
            SettingError,
            "schedule.name is 'cosine'",
        ),
        (Rows(), {"schedule": ScheduleSettings("constant", 0.1)}, SettingError, "warmup 0.1"),
        (Rows(), {"epochs": 1.5}, SettingError, "epochs is 1.5"),
        (
            Rows(),
            {"data": DataSettings(shuffle=True)},
            SettingError,
            "data.shuffle is True, and Rows",
        ),
        (OddState(), {}, DataError, r"OddState.*\['rng'\] is a Tensor"),
        (DataLoader(Pairs(50)), {}, DataError, r"Batches\(loader\)"),
        (Batches([]), {}, DataError, "no samples"),
    ],
)
def test_what_cannot_be_is_refused(
    data: Any, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run(data, dataclasses.replace(CONSTANT, **changes))
