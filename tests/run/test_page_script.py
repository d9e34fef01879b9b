"""The script of a page: no other script may run, and it draws the data in the page."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import math
import threading
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import shown_by_browser, wider_than_shown
from torch import nn

from drivetrain import Recipe, Settings, fit
from drivetrain.cli.report.compare import RunReader, RunRecords, page
from drivetrain.cli.report.serve import PageServer, Served
from drivetrain.run.charts import Chart, Series, within_bounds
from drivetrain.run.page_script import content_security_policy, data_element, script
from drivetrain.run.run_history import FIGURES, RunHistory
from drivetrain.run.shown_config import ShownConfig
from drivetrain.trainer.setting_values import override

STARTED = {"event": "run_started", "time": 1000.0, "first_step": 0, "num_parameters": 7}
HOSTILE = "</script><script>document.title = 'ran'</script><img src=x onerror='x()'>\u2028<!--"


def logged(step: int, at: float, **more: Any) -> dict[str, Any]:
    figures = {**dict.fromkeys(FIGURES, 0.5), "item_name": "samples", "total_steps": 9, **more}
    return {"event": "logged", "time": at, "step": step, **figures}


def run_of(name: str, *records: dict[str, Any]) -> RunRecords:
    settings = {"checkpoint.best_metric": {"value": "loss", "source": HOSTILE}}
    config = ShownConfig.of({"name": name, "settings": settings})
    return RunRecords(name, RunHistory.of([STARTED, *records]), config)


class Elements(HTMLParser):
    """A parser that collects the elements of a page with their attributes, and the texts of its
    scripts.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._in_script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._in_script = tag == "script"
        if self._in_script:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.scripts[-1] += data


def hostile_run() -> RunRecords:
    measured = {"event": "evaluated", "time": 1e200, "step": 1, "name": HOSTILE}
    ended = {"event": "run_ended", "step": 1, "reason": HOSTILE, "seconds": 1.0}
    losses = {HOSTILE: None}
    return run_of(
        HOSTILE,
        logged(1, 1001.0, losses=losses, item_name=HOSTILE),
        {**measured, "metrics": {HOSTILE: 0.5, "loss": 0.25}},
        ended,
    )


def test_a_hostile_run_adds_no_script_and_the_page_allows_only_its_own() -> None:
    for text in (page([hostile_run()]), page([hostile_run(), hostile_run()], every=2.0)):
        seen = Elements(text)
        held, own = seen.scripts
        assert own == script() and "\u2028" not in held
        lines = [line for chart in json.loads(held)["charts"] for line in chart["lines"]]
        assert HOSTILE in {line["name"] for line in lines}
        assert not {tag for tag, _ in seen.found} & {"img", "iframe", "link", "object"}
        assert not [name for _, given in seen.found for name in given if name.startswith("on")]
        metas = {given.get("http-equiv"): given.get("content") for _, given in seen.found}
        assert metas["Content-Security-Policy"] == content_security_policy()
    digest = base64.b64encode(hashlib.sha256(own.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in content_security_policy()
    assert "default-src 'none'" in content_security_policy()


def test_data_of_the_page_is_bounded_and_holds_what_is_drawn() -> None:
    points = [(step, 1 / step) for step in range(1, 2001)]
    small = within_bounds([Chart("a", [Series("a", points)]), Chart("b", [Series("b", [])])])
    assert [chart.title for chart in small] == ["a"] and len(small[0].lines[0].points) <= 500
    many = within_bounds([Chart(str(n), [Series("a", points)] * 10) for n in range(40)])
    assert len(data_element(many, [points])) < 600_000
    crowd = within_bounds([Chart("a", [Series("a", points)] * 5000)])
    assert len(crowd[0].lines) == 100


def test_the_clock_leaves_out_pauses_between_runs() -> None:
    again = {**STARTED, "time": 90_000.0, "first_step": 2}
    records = [logged(1, 1010.0), logged(2, 1020.0), logged(3, 1030.0), again, logged(3, 90_015.0)]
    assert RunHistory.of([STARTED, *records]).clock() == [(1, 10.0), (2, 20.0), (3, 35.0)]
    without = [{k: v for k, v in logged(1, 0.0).items() if k != "time"}]
    assert RunHistory.of(without).clock() == []


def test_a_run_that_goes_on_says_what_is_left_and_when_it_was_seen() -> None:
    run = run_of("a", logged(1, 1764066718.0, seconds_left=90.0))
    for text in (page([run]), page([run, run])):
        assert "Time left" in text and "0:01:30" in text
        assert '<time data-at="1764066718">2025-11-25 10:31:58 UTC</time>' in text
    ended = {"event": "run_ended", "step": 1, "reason": "finished", "seconds": 1.0}
    assert "Time left" not in page([run_of("a", logged(1, 1.0, seconds_left=90.0), ended)])
    refresh = '<noscript><meta http-equiv="refresh" content="2.5"></noscript>'
    assert refresh in page([run], every=2.5)
    assert 'http-equiv="refresh"' not in page([run])


@pytest.mark.slow
def test_a_browser_draws_and_renews_the_page(tmp_path: Path) -> None:
    steps = itertools.count(1)

    def make() -> str:
        step = min(3, next(steps))
        more = [logged(each, 1000.0 + each, loss=None) for each in range(2, step + 1)]
        return page([hostile_run(), run_of("b", logged(1, 1001.0), *more)], every=0.2)

    with PageServer(Served(make, object), "127.0.0.1", 0, 0.2) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        try:
            address = f"http://127.0.0.1:{serving.server_port}/"
            text = shown_by_browser(address, tmp_path, milliseconds=4000)
        finally:
            serving.shutdown()
            thread.join()
    assert "<title>2 runs</title>" in text and next(steps) > 3
    assert "step 3/9" in text, "it was renewed in its place"
    assert '<form id="controls">' in text, "the script shows its controls"
    assert text.count('class="tip"') == text.count("<figure "), "each chart was drawn by the script"
    assert " ago)</time>" in text


@pytest.mark.slow
def test_pages_of_runs_fit_a_phone(tmp_path: Path) -> None:
    """Require it of a run with all sections and long names, and of a comparison of runs."""
    folder = tmp_path / "a-run-with-a-name-as-long-as-experiments-often-have"
    rows = list(torch.randn(64, 8))
    rows[20] = torch.full((8,), math.nan)
    recipe = Recipe(
        model=lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(12))),
        loss=lambda module, batch: module(batch).square().sum(),
        train_data=rows,
        eval_data={"a_held_out_data_set_with_a_long_name": rows[:16]},
        measure=lambda module, batch: {
            f"sum_of_squared_differences_at_threshold_{n}": module(batch).square().sum() / n
            for n in range(1, 9)
        },
    )
    settings = override(
        Settings(),
        {"steps": 16, "global_batch": 4, "log_every": 1, "evaluate.every": 4, "stats.every": 1},
    )
    fit(recipe, settings, backend="cpu", out=folder, progress=False)
    (tmp_path / "runs.html").write_text(page([RunReader(folder).read(), hostile_run()]))
    shown = [folder / "report.html", tmp_path / "runs.html"]
    assert wider_than_shown(tmp_path, shown, [1280, 390], tmp_path / "profile") == set()
