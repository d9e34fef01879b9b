"""A collate function that leaves samples out: means are over those that are left, and a note says
so.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain import DataSettings, Recipe, ScheduleSettings, Settings, fit
from drivetrain.data.left_out import rows_of
from drivetrain.kernel.events import Evaluated, Logged, Warned
from drivetrain.run.record_file import read_records

Row = tuple[int, Tensor, Tensor]
SETTINGS = Settings(
    steps=4,
    global_batch=8,
    micro_batch=4,
    log_every=1,
    max_grad_norm=None,
    schedule=ScheduleSettings("constant"),
)


def rows() -> list[Row]:
    numbers = torch.Generator().manual_seed(0)
    x, y = torch.randn(32, 4, generator=numbers), torch.randn(32, 1, generator=numbers)
    return [(index, x[index], y[index]) for index in range(32)]


class Stream:
    def __iter__(self) -> Iterator[Row]:
        return iter(rows())


class LeavesOut:
    """Leaves out the samples with these indices."""

    def __init__(self, *broken: int) -> None:
        self.broken = broken

    def __call__(self, samples: list[Row]) -> tuple[Tensor, Tensor]:
        left = [(x, y) for index, x, y in samples if index not in self.broken]
        empty = [(torch.zeros(0, 4), torch.zeros(0, 1))]
        first, second = zip(*left, strict=True) if left else zip(*empty, strict=True)
        return (torch.stack(first), torch.stack(second)) if left else (first[0], second[0])


def loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (module(batch[0]) - batch[1]).square().sum()


def mean_loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return loss(module, batch) / max(1, len(batch[0]))


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in parameters], lr=0.1)


def recipe(collate: Any, data: Any = None, **more: Any) -> Recipe:
    data = rows() if data is None else data
    return Recipe(build, loss, data, collate=collate, optimizer=sgd, **more)


def train(recipe: Recipe, settings: Settings = SETTINGS) -> tuple[list[Any], list[str]]:
    """Return the events of a run, and its warnings."""
    events: list[Any] = []
    fit(recipe, settings, backend="cpu", observers=[events.append])
    return events, [event.message for event in events if isinstance(event, Warned)]


def by_hand(broken: tuple[int, ...]) -> list[float]:
    """Return the losses of a plain loop over the samples that are left, in their own order."""
    module, losses = build(), []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for start in range(0, 32, 8):
        left = [row for row in rows()[start : start + 8] if row[0] not in broken]
        x, y = (torch.stack([row[part] for row in left]) for part in (1, 2))
        value = (module(x) - y).square().mean()
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


@pytest.mark.parametrize("way", ["indexed", "stream", "mean"])
def test_means_are_over_the_samples_that_are_left(way: str) -> None:
    broken = (1, 2, 3, 12, 28)
    chosen = recipe(LeavesOut(*broken), Stream() if way == "stream" else None)
    if way == "mean":
        chosen = replace(chosen, loss=mean_loss, loss_is="mean")
    in_order = replace(SETTINGS, data=DataSettings(shuffle=None if way == "stream" else False))
    events, warned = train(chosen, in_order)
    logged = [event for event in events if isinstance(event, Logged)]
    assert [event.loss for event in logged] == pytest.approx(by_hand(broken), rel=1e-5)
    assert [event.items for event in logged] == [5, 12, 20, 27]
    (note,) = [line for line in warned if "left out" in line]
    assert note.startswith("recipe.collate left out 3 of the 8 samples of step 1: samples 0 to 7")
    assert "Recipe(count_items=...)" in note


def test_an_update_without_samples_is_in_no_mean() -> None:
    every_second = replace(SETTINGS, log_every=2, data=DataSettings(shuffle=False))
    events, warned = train(recipe(LeavesOut(*range(8, 16))), every_second)
    first, *_ = (event.loss for event in events if isinstance(event, Logged))
    assert first == pytest.approx(by_hand(())[0], rel=1e-5)
    (note,) = [line for line in warned if "no items" in line]
    assert note.startswith("step 2 had no items: samples 8 to 15 of epoch 0")

    events, _ = train(recipe(LeavesOut(*range(8, 16))), replace(every_second, log_every=1))
    logged = [event.loss for event in events if isinstance(event, Logged)]
    assert [loss != loss for loss in logged] == [False, True, False, False]  # NaN: not a mean of 0


def test_an_evaluation_is_over_the_samples_that_are_left() -> None:
    chosen = recipe(LeavesOut(*range(16)), eval_data={"all": rows(), "left": rows()[16:]})
    events, warned = train(chosen)
    found = {event.name: event.metrics["loss"] for event in events if isinstance(event, Evaluated)}
    assert found["all"] == pytest.approx(found["left"], rel=1e-6)
    notes = [line for line in warned if "evaluation set" in line]
    assert len(notes) == 1
    assert notes[0].startswith("recipe.collate left out 16 of the 32 samples of the evaluation set")


@pytest.mark.parametrize("way", ["all are there", "counted", "their dimensions differ"])
def test_nothing_is_said_where_nothing_is_known_to_be_left_out(way: str) -> None:
    chosen = recipe(LeavesOut(*([] if way == "all are there" else [1, 2])))
    if way == "counted":
        chosen = replace(chosen, count_items=lambda batch: 1)
    if way == "their dimensions differ":
        whole = LeavesOut(1)
        pair: Any = lambda samples: (*whole(samples), torch.zeros(len(samples)))  # noqa: E731
        chosen = replace(chosen, collate=pair)
    _, warned = train(chosen)
    assert not [line for line in warned if "left out" in line]


def test_rows_are_what_all_tensors_agree_on() -> None:
    assert rows_of({"x": torch.zeros(3, 2), "y": [torch.zeros(3)], "scale": torch.tensor(2.0)}) == 3
    assert rows_of((torch.zeros(3), torch.zeros(4))) is None
    assert rows_of(["a", "b"]) is None


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
from test_left_out import LeavesOut, SETTINGS, recipe, rows
from drivetrain import fit
nproc = int(sys.argv[3])
chosen = recipe(LeavesOut(1, 2, 3, 12, 28), eval_data={"all": rows()})
fit(chosen, SETTINGS, backend="ddp" if nproc > 1 else "cpu", nproc=nproc, out=sys.argv[2])
"""


@pytest.mark.slow  # two ranks that a launcher starts and ends
def test_ranks_count_together(tmp_path: Path) -> None:
    found = []
    for nproc in (1, 2):
        out, here = tmp_path / str(nproc), str(Path(__file__).parent)
        command = [sys.executable, "-c", SCRIPT, here, str(out), str(nproc)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        records = list(read_records(out / "metrics.jsonl"))
        found.append([r["loss"] for r in records if r["event"] == "logged"])
        found[-1] += [r["metrics"]["loss"] for r in records if r["event"] == "evaluated"]
        assert len([r for r in records if "left out" in r.get("message", "")]) == 2
    assert found[0] == pytest.approx(found[1], rel=1e-5)
