"""A run that `fit` starts has the same folder, records and display as a run of the command line."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from drivetrain import Recipe, Settings, UsageError, fit
from drivetrain.cli.app import app
from drivetrain.cli.report.serve import PageServer
from drivetrain.run import recorded_fit
from drivetrain.run.notebook import NotebookProgress
from drivetrain.trainer.settings import DataSettings

FILE = """
import torch
from torch import nn
from drivetrain import Recipe

DATA = [{"x": torch.full((2,), float(i % 3)), "y": torch.ones(1)} for i in range(16)]

recipe = Recipe(
    model=lambda: nn.Linear(2, 1),
    loss=lambda module, batch: (module(batch["x"]) - batch["y"]).square().sum(),
    train_data=DATA,
    eval_data={"held_out": DATA},
)


def predict(module, batch):
    return module(batch["x"])
"""
DATA = [{"x": torch.full((2,), float(i % 3)), "y": torch.ones(1)} for i in range(16)]
SETTINGS = Settings(steps=4, global_batch=4, log_every=2)


def recipe() -> Recipe:
    return Recipe(
        model=lambda: nn.Linear(2, 1),
        loss=lambda module, batch: (module(batch["x"]) - batch["y"]).square().sum(),
        train_data=DATA,
        eval_data={"held_out": DATA},
    )


def train(**arguments: Any) -> Any:
    return fit(recipe(), arguments.pop("settings", SETTINGS), backend="cpu", **arguments)


def command(*words: str) -> Any:
    done = CliRunner().invoke(app, [*words])
    message = str(done.exception or "")
    return SimpleNamespace(code=done.exit_code, text=done.output + message)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "first"
    train(out=folder, progress=False)
    return folder


def test_it_writes_the_files_of_a_run_and_prints_to_stderr_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = train(out=tmp_path / "run")

    shown = capfd.readouterr()
    assert shown.out == ""
    assert "step 2/4" in shown.err and "held_out: loss" in shown.err
    assert str(result.checkpoint) in shown.err and "report.html" in shown.err
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["settings"]["steps"] == {"value": 4, "source": "fit"}
    assert config["settings"]["seed"] == {"value": 0, "source": "default"}
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines][-1] == "run_ended"
    report = (tmp_path / "run" / "report.html").read_text()
    assert "held_out" in report and "started by fit" in report and "the default)" not in report


def test_without_progress_and_folder_nothing_is_shown_or_written(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    train(progress=False)
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("saves", [True, False])
def test_without_progress_warnings_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, saves: bool
) -> None:
    out = tmp_path / "run" if saves else None
    train(settings=Settings(steps=2, global_batch=32), out=out, progress=False)
    assert ["global_batch" in message for message in caplog.messages] == [True]
    assert {record.name for record in caplog.records} == {"drivetrain"}


def test_without_progress_skipped_steps_and_changes_of_a_resume_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    last = [*DATA[:-1], {"x": torch.full((2,), math.nan), "y": torch.ones(1)}]
    broken = dataclasses.replace(recipe(), train_data=last, eval_data={})
    settings = Settings(steps=4, global_batch=4, data=DataSettings(shuffle=False))
    fit(broken, settings, backend="cpu", out=tmp_path / "run", progress=False)
    assert "step 4 was not applied" in caplog.text
    caplog.clear()
    longer = dataclasses.replace(recipe(), train_data=DATA * 2)
    more = dataclasses.replace(settings, steps=5)
    fit(longer, more, backend="cpu", out=tmp_path / "run", resume="auto", progress=False)
    assert "resumed at step 4" in caplog.text and "length of train_data" in caplog.text


def test_a_folder_that_holds_a_run_is_refused(run: Path) -> None:
    before = sorted(run.rglob("*"))
    with pytest.raises(UsageError, match=r'first is not empty.*resume="auto".*another out'):
        train(out=run, progress=False)
    assert sorted(run.rglob("*")) == before


def test_a_finished_run_that_is_resumed_returns_its_figures(tmp_path: Path) -> None:
    first = train(out=tmp_path / "run", progress=False)
    again = train(out=tmp_path / "run", resume="auto", progress=False)
    assert again.step == first.step and again.metrics == first.metrics != {}
    assert again.loss == first.loss and math.isfinite(again.loss)


def test_fewer_steps_than_are_done_are_refused(run: Path) -> None:
    fewer = Settings(steps=3, global_batch=4, log_every=2)
    with pytest.raises(UsageError, match=r"steps is 3, and .* is at step 4 already"):
        train(settings=fewer, out=run, resume="auto", progress=False)


def test_the_commands_ask_for_the_recipe_and_take_the_run(run: Path, tmp_path: Path) -> None:
    predicted = tmp_path / "predicted.jsonl"
    to_file = ["--out", str(predicted), "--backend", "cpu"]
    for words in (
        ["evaluate", str(run)],
        ["train", "--resume", str(run), "--steps", "6"],
        ["predict", str(run), *to_file],
    ):
        refused = command(*words)
        assert refused.code and "started from Python by fit" in refused.text, refused.text
        assert "give the recipe file" in refused.text
    assert not predicted.exists()
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    assert command("evaluate", str(run), str(file), "--backend", "cpu", "--json").code == 0
    assert command("report", str(run), "--out", str(tmp_path / "page.html")).code == 0
    done = command("predict", str(run), str(file), *to_file, "--json")
    assert done.code == 0, done.text
    rows = [json.loads(line) for line in predicted.read_text().splitlines()]
    outputs = [row["output"] for row in rows]  # of the file's own model and evaluation set
    assert len(outputs) == 16 and {len(output) for output in outputs} == {1}


def test_a_run_that_lost_its_record_is_asked_for_its_recipe(run: Path, tmp_path: Path) -> None:
    """Name a file in `config.json` that is gone, or remove `config.json` itself."""
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    config = copy / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"recipe": "gone.py"}))
    words = ["predict", str(copy), "--out", str(tmp_path / "p.jsonl"), "--backend", "cpu"]
    assert "there is no recipe file gone.py; give the path" in command(*words).text
    config.unlink()
    refused = command(*words)
    assert refused.code and "give the recipe file" in refused.text
    assert not (tmp_path / "p.jsonl").exists()


def test_watch_serves_the_page_of_the_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages: list[str] = []

    def serve(server: PageServer) -> None:
        pages.append(server._served.now()[1].decode())
        raise KeyboardInterrupt

    monkeypatch.setattr(PageServer, "serve_forever", serve)
    done = command("watch", str(run))
    assert done.code == 0 and "http://127.0.0.1:" in done.text and "ended" in done.text
    assert "held_out" in pages[0] and "finished at step 4" in pages[0]


def test_a_notebook_gets_one_display_that_is_redrawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Simulate a kernel of Jupyter, which is detected by IPython's application, and record its
    display.
    """
    pages: list[str] = []
    shown: list[str] = []
    handle = SimpleNamespace(update=pages.append)

    def display(page: str, display_id: bool) -> Any:
        shown.append(page)
        return handle

    ipython = SimpleNamespace(HTML=str, display=display)
    shell = SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setattr(recorded_fit, "NotebookProgress", lambda: NotebookProgress(ipython))
    train(out=tmp_path / "run")

    assert len(shown) == 1 and capfd.readouterr() == ("", "")
    assert '<progress value="4" max="4">' in pages[-1]
    assert "<th>training loss</th><th>held_out loss</th>" in pages[-1]
    assert "saved" in pages[-1]
