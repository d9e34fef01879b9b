"""`drivetrain report` and `watch`: runs on one page."""

from __future__ import annotations

import json
import re
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Drive

from drivetrain.cli.report.compare import RunReader, RunRecords, page, read_run
from drivetrain.cli.report.serve import PageServer, Served
from drivetrain.kernel.errors import CheckpointNotFound, OutputError
from drivetrain.run.page_script import content_security_policy
from drivetrain.run.run_history import RunHistory
from drivetrain.run.shown_config import ShownConfig
from drivetrain.run.system_figures import SystemFigures

STARTED = {"event": "run_started", "first_step": 0, "num_parameters": 7}


def logged(step: int, loss: float | None) -> dict[str, Any]:
    return {
        "event": "logged",
        "step": step,
        "total_steps": 9,
        "loss": loss,
        "learning_rate": 0.1,
        "grad_norm": 1.0,
        "items_per_second": 5.0,
        "item_name": "samples",
    }


def evaluated(step: int, name: str, loss: float) -> dict[str, Any]:
    return {"event": "evaluated", "step": step, "name": name, "metrics": {"loss": loss}}


def run_of(name: str, *records: dict[str, Any], **settings: Any) -> RunRecords:
    entries = {key: {"value": value, "source": "default"} for key, value in settings.items()}
    config = ShownConfig.of({"settings": entries, "backend": "cpu"})
    return RunRecords(name, RunHistory.of([STARTED, *records]), config)


@pytest.mark.slow
def test_runs_stand_beside_each_other(drive: Drive, recipe: Path, tmp_path: Path) -> None:
    for rate in ("1e-3", "1e-2"):
        given = ("--set", f"optimizer.lr={rate}", "--out", f"runs/{rate}")
        assert drive("train", recipe, "--backend", "cpu", *given).code == 0
    made = drive("report", "runs/1e-3", "runs/1e-2", "--out", "both.html")
    assert made.code == 0, made.stderr
    text = (tmp_path / "both.html").read_text()
    assert text.count("finished at step 6") == 2
    assert re.search(r"<td>optimizer.lr</td><td>0.001</td><td>0.01</td>", text)
    assert "<td>seed</td>" not in text, "all have the same"
    for title in ("Training loss", "held_out: loss"):
        figure = text[text.index(f"<figcaption>{title}") :]
        chart = figure[: figure.index("</figure>")]
        assert "runs/1e-3" in chart and "runs/1e-2" in chart and "var(--line-2)" in chart
    alone = drive("report", "runs/1e-3")
    assert alone.code == 0, alone.stderr
    assert "Settings" in (tmp_path / "runs/1e-3/report.html").read_text()


def test_every_metric_of_an_evaluation_is_drawn_and_the_best_is_marked() -> None:
    """Mark the best evaluation by the run's setting; of several runs, the best of each."""
    chosen = {"checkpoint.best_metric": "held_out.accuracy", "checkpoint.best_mode": "max"}
    measured = {
        **evaluated(2, "held_out", 0.5),
        "metrics": {"loss": 0.5, "accuracy": 0.75, "f1": 0.25},
    }
    later = {**measured, "step": 4, "metrics": {"loss": 0.4, "accuracy": 0.71, "f1": 0.3}}
    run = run_of("runs/a", logged(2, 1.0), measured, later, evaluated(4, "other", 9.0), **chosen)
    alone, both = page([run]), page([run, run_of("runs/b", measured, later)])
    captions = re.findall(r"<figcaption>([^<]*)", alone)
    assert captions[:3] == ["Loss", "held_out: accuracy", "held_out: f1"]
    compared = re.findall(r"<figcaption>([^<]*)", both)
    assert {"held_out: loss", "held_out: f1", "other: loss"} <= set(compared)
    for text in (alone, both):
        assert text.count('class="best"') == 1
        assert "best 0.75 at step 2" in text
    loss = page([run_of("a", measured, later, **{"checkpoint.best_metric": "loss"})])
    assert "best 0.4 at step 4" in loss
    assert 'class="best"' not in page([run_of("a", measured, **{"checkpoint.best_metric": "x"})])


def test_figures_of_the_system_are_drawn() -> None:
    """Draw only the known figures. Records of older runs have none."""
    system = {"process_bytes": 3e8, "process_peak_bytes": 4e8, "processor_cores": 1.5}
    run = run_of("runs/a", logged(1, 1.0), *({**logged(s, 1.0), **system} for s in (2, 3)))
    for text in (page([run]), page([run, run_of("runs/b", logged(1, 1.0))])):
        assert "<figcaption>Memory of the process (bytes)" in text
        assert "<figcaption>Processor load (cores)" in text
        assert "Memory of the device" not in text
    on_gpu = {**system, "device_bytes": 1e9, "device_peak_bytes": 2e9}
    assert "Memory of the device (bytes)" in page([run_of("a", {**logged(1, 1.0), **on_gpu})])


def test_a_process_reports_what_it_uses() -> None:
    figures = SystemFigures(torch.device("cpu"))
    held = torch.ones(20_000_000)  # 80 MB, and some work
    held.add_(1)
    found = figures.now()
    assert 80e6 < found["process_bytes"] <= found["process_peak_bytes"] < 1e12
    assert 0 < found["processor_cores"] < 1000
    assert "device_bytes" not in found


def test_metrics_without_end_are_left_out_by_name() -> None:
    metrics = {f"metric {number}": 1.0 for number in range(30)}
    run = run_of("runs/a", *({**evaluated(s, "held_out", 1.0), "metrics": metrics} for s in (1, 2)))
    for text in (page([run]), page([run, run])):
        assert text.count("<figcaption>held_out: metric") == 24
        left_out = text[text.index("Left out") :]
        assert "6 metrics of evaluations after the first 24: held_out: metric 24, " in left_out


def test_names_are_text_and_no_markup(tmp_path: Path) -> None:
    names = ["_a", "$b$ $", '"><script>alert(1)</script>']
    runs = [run_of(n, logged(1, 2.0), evaluated(1, n, 1.0), lr=i) for i, n in enumerate(names)]
    text = page(runs)
    assert "<script>alert" not in text
    assert text.count("_a") >= 3


def test_runs_need_not_have_come_as_far_or_measured_the_same() -> None:
    text = page(
        [
            run_of("new"),
            run_of("nan", logged(1, None), logged(2, 3.0)),
            run_of("other", evaluated(1, "elsewhere", 4.0)),
            *(run_of(f"run {number}", logged(1, 1.0)) for number in range(30)),
        ]
    )
    assert "nothing logged yet" in text and "elsewhere: loss" in text and "step 2/9" in text


def test_what_is_no_run_is_refused(drive: Drive, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for command in ("report", "watch"):
        ran = drive(command, "empty")
        assert ran.code == 2
        assert "no run folder" in ran.stderr
    with pytest.raises(CheckpointNotFound):
        read_run(tmp_path / "missing")


def test_the_page_is_served_as_the_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in (STARTED, logged(1, 2.0))))
    reader = RunReader(tmp_path)
    served = Served(lambda: page([reader.read()]), reader.changes)
    with PageServer(served, "127.0.0.1", 0, 5.0) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        try:
            address = f"http://127.0.0.1:{serving.server_port}"

            def ask(below: str = "/") -> tuple[str, dict[str, str]]:
                opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
                with opener.open(address + below) as answer:
                    return answer.read().decode(), dict(answer.headers)

            text, headers = ask()
            assert "step 1/9" in text
            assert "Refresh" not in headers, "a page renews itself"
            assert headers["Content-Security-Policy"] == content_security_policy()
            with path.open("a") as file:
                file.write(json.dumps(logged(2, 1.0)) + "\n")
            assert "step 2/9" in ask()[0]
            for other in ("/metrics.jsonl", "/../../etc/passwd"):
                with pytest.raises(urllib.error.HTTPError, match="404"):
                    ask(other)
            path.unlink()
            with pytest.raises(urllib.error.HTTPError, match="503") as gone:
                ask()
            assert gone.value.headers["Refresh"] == "5"
            gone.value.close()
            with pytest.raises(OutputError, match="another port"):
                PageServer(served, "127.0.0.1", serving.server_port, 5.0)
        finally:
            serving.shutdown()
            thread.join()
