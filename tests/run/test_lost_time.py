"""The account of a run's hours over all of its starts; its percents add up to 100."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import Recipe, Settings, fit
from drivetrain.cli.report.checkpoints import inspect_named
from drivetrain.run.charts import charts
from drivetrain.run.curves import figure
from drivetrain.run.lost_time import KINDS, LostTime, whole_percents
from drivetrain.run.page_script import data_element
from drivetrain.run.record_file import read_records
from drivetrain.run.record_schema import grouped
from drivetrain.run.run_history import RunHistory
from drivetrain.run.shown_config import ShownConfig


def started(at: float, first_step: int = 0, starting: float = 2.0) -> dict[str, Any]:
    own = {"num_parameters": 7, "first_step": first_step, "starting_seconds": starting}
    return {"event": "run_started", "time": at, **own}


def logged(step: int, at: float, **parts: float) -> dict[str, Any]:
    figures = dict.fromkeys(("loss", "learning_rate", "grad_norm", "items_per_second"), 0.5)
    other = {"item_name": "samples", "parts": parts}
    return {"event": "logged", "time": at, "step": step, **figures, **other}


def spent(step: int, at: float, **rest: float) -> dict[str, Any]:
    return {"event": "time_spent", "time": at, "step": step, "rest": rest, "verdicts": []}


def lost(*records: dict[str, Any]) -> dict[str, float]:
    return RunHistory.of(records).lost.seconds()


def test_a_run_without_a_restart_is_divided_by_its_parts() -> None:
    assert lost(
        started(100.0),
        logged(10, 110.0, starting=1.0, data=2.0, compute=6.0, ranks=1.0),
        logged(20, 120.0, compute=5.0, evaluation=3.0, update=1.0, observers=1.0),
        spent(20, 124.0, saving=4.0),
    ) == {
        "training": 14.0,
        "evaluation": 3.0,
        "saving": 4.0,
        "waiting for data": 2.0,
        "starting": 3.0,
    }


def test_steps_that_a_restart_repeats_are_work_done_twice_and_the_pause_is_standing_still() -> None:
    found = lost(
        started(100.0),
        logged(10, 110.0, compute=10.0),
        logged(20, 120.0, compute=8.0, data=2.0),
        {"event": "saved", "time": 121.0, "step": 20, "seconds": 0.5},
        {"event": "resumed", "time": 162.0, "step": 15},  # by the next start
        started(163.0, first_step=15, starting=3.0),  # 39 s after the last record
        logged(20, 168.0, compute=5.0),
        spent(20, 168.0, compute=0.0, saving=1.0),
    )
    assert found == pytest.approx(
        {
            "training": 10.0 + 4.0 + 5.0,
            "waiting for data": 1.0,
            "saving": 1.5,
            "starting": 5.0,
            "work done twice": 5.0 + 0.5,  # half of a span, and what the killed run did at last
            "standing still": 39.0,
        }
    )
    assert sum(found.values()) == pytest.approx(168.0 - 98.0 + 1.0)


@pytest.mark.parametrize("change", ["rank_lost", "rejoined"])
def test_ranks_that_die_or_join_are_no_start_of_the_run(change: str) -> None:
    """The run stands still for as long as it says, and starts once."""
    assert lost(
        started(100.0),
        logged(10, 110.0, compute=10.0),
        {"event": change, "time": 112.0, "step": 12},
        started(112.2, first_step=12),
        {"event": "reformed", "time": 112.3, "step": 12, "seconds": 0.5, "steps_back": 0},
        logged(20, 120.5, compute=10.0),
        spent(20, 120.5),
    ) == {"training": 20.0, "starting": 2.0, "standing still": 0.5}


def test_a_rollback_is_work_done_twice() -> None:
    found = lost(
        started(0.0, starting=0.0),
        logged(10, 10.0, compute=10.0),
        logged(20, 20.0, compute=10.0),
        {"event": "rolled_back", "time": 21.0, "step": 10, "left_out": 2},
        logged(20, 30.0, compute=9.0),
    )
    assert found == {"training": 19.0, "work done twice": 10.0}


def test_an_evaluation_by_another_process_takes_no_time_of_the_run() -> None:
    evaluated = {"event": "evaluated", "step": 10, "name": "a", "metrics": {}, "seconds": 50.0}
    later = {**evaluated, "time": 900.0, "evaluated_on": "cpu"}
    found = lost(
        started(0.0, starting=0.0),
        logged(10, 10.0, compute=10.0),
        spent(10, 11.0, saving=1.0),
        later,
        started(1000.0, first_step=10, starting=0.0),
    )
    assert found == {"training": 10.0, "saving": 1.0, "standing still": 989.0}


def test_records_of_a_version_without_parts_are_training() -> None:
    old = {**logged(10, 8.0)}
    del old["parts"]
    assert lost(started(0.0, starting=0.0), old) == {"training": 8.0}


def add(made: LostTime, records: list[Any]) -> None:
    for group in grouped(records):
        made.add(group)


def test_a_million_logs_need_little_memory_and_lose_no_second() -> None:
    made = LostTime()
    add(made, [started(0.0, starting=0.0)])
    for step in range(1, 20_001):
        add(made, [logged(step, float(step), compute=0.75, data=0.25)])
    assert len(made._spans) <= 2001
    add(made, [started(20_000.0, first_step=5_000, starting=0.0)])
    assert made.seconds() == pytest.approx(
        {"training": 3750.0, "waiting for data": 1250.0, "work done twice": 15_000.0}, rel=0.01
    )


def test_logs_that_are_added_together_count_like_single_ones() -> None:
    together, alone = LostTime(), LostTime()
    records = [logged(step, step / 4, data=0.1, compute=step % 3 / 8) for step in range(1, 9001)]
    for at in (0, 17, 5000, 5001):
        del records[at]["parts"]
    records[7000]["step"] = 3  # out of order
    records[8000]["parts"] |= {"starting": 2.0, "saving": None, "data": -1.0}
    records[8500]["evaluated_on"] = "cpu"
    records[-1]["time"] = None
    for made, size in ((together, 500), (alone, 1)):
        add(made, [started(0.0)])
        for first in range(0, len(records), size):
            add(made, records[first : first + size])
        add(made, [started(2300.0, first_step=6000)])
    assert together.seconds() == pytest.approx(alone.seconds())


def test_percents_add_up_to_100() -> None:
    assert whole_percents({"a": 1.0, "b": 1.0, "c": 1.0}) == {"a": 34, "b": 33, "c": 33}
    assert whole_percents({}) == {}
    generator = random.Random(1)
    for _ in range(200):
        seconds = {kind: generator.random() ** 4 for kind in KINDS}
        percents, total = whole_percents(seconds), sum(seconds.values())
        assert sum(percents.values()) == 100
        assert all(abs(percents[k] - 100 * s / total) < 1 for k, s in seconds.items())


def test_shares_are_drawn_on_top_of_each_other() -> None:
    records = [started(0.0), *(logged(n, n, compute=3.0, data=1.0) for n in (1, 2, 3))]
    history = RunHistory.of(records)
    (chart,) = (c for c in charts(history, ShownConfig.of({})) if c.stacked)
    assert chart.title == "Where the time goes (%)"
    assert [(line.name, line.points[0][1]) for line in chart.lines] == [
        ("waiting for data", 25.0),
        ("forward and backward", 100.0),
    ]
    drawn = figure(chart, 0)
    assert drawn.count("Z") == 2
    assert drawn.index("--line-2)") > 0
    assert '"stacked":true' in data_element([chart], [])


def test_a_run_that_was_resumed_says_where_its_hours_went(tmp_path: Path) -> None:
    recipe = Recipe(
        model=lambda: nn.Linear(4, 1),
        loss=lambda module, batch: module(batch).square().sum(),
        train_data=torch.randn(64, 4),
    )
    for steps in (4, 8):
        settings = Settings(steps=steps, global_batch=4, log_every=2)
        fit(recipe, settings, backend="cpu", out=tmp_path, resume="auto", progress=False)
    records = read_records(tmp_path / "metrics.jsonl")
    seconds = RunHistory.of(records).lost.seconds()
    wall = records[-1]["time"] - records[0]["began"]
    assert 0.9 * wall <= sum(seconds.values()) <= wall + 0.01
    assert {"training", "saving", "starting", "standing still"} <= seconds.keys()
    assert sum(inspect_named(tmp_path)["time"].values()) == 100
    page = (tmp_path / "report.html").read_text()
    assert "Where the time went" in page
    assert "from the last record of a run to its restart" in page
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["starting_seconds"]
