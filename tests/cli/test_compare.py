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
from command_line import Drive

from drivetrain.cli.compare import RunRecords, page, read_run
from drivetrain.cli.serve import server
from drivetrain.kernel.errors import CheckpointNotFound, OutputError

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
    return RunRecords(name, [STARTED, *records], {"settings": entries, "backend": "cpu"})


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


def test_names_are_text_and_no_markup(tmp_path: Path) -> None:
    names = ["_a", "$b$ $", '"><script>alert(1)</script>']
    runs = [run_of(n, logged(1, 2.0), evaluated(1, n, 1.0), lr=i) for i, n in enumerate(names)]
    text = page(runs)
    assert "<script" not in text
    assert text.count("_a") >= 3, "matplotlib leaves out what begins with an underscore"


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
    with server(lambda: page([read_run(tmp_path)]), "127.0.0.1", 0, 5.0) as serving:
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
            assert headers["Refresh"] == "5"
            with path.open("a") as file:
                file.write(json.dumps(logged(2, 1.0)) + "\n")
            assert "step 2/9" in ask()[0]
            for other in ("/metrics.jsonl", "/../../etc/passwd"):
                with pytest.raises(urllib.error.HTTPError, match="404"):
                    ask(other)
            path.unlink()
            with pytest.raises(urllib.error.HTTPError, match="503"):
                ask()
            with pytest.raises(OutputError, match="another port"):
                server(lambda: "", "127.0.0.1", serving.server_port, 5.0)
        finally:
            serving.shutdown()
            thread.join()
