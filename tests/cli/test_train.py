"""A run: its folder, its output, and its resumption."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from command_line import Drive, when_it_trains

from drivetrain.cli.process.launch import Launch, run_ranks
from drivetrain.kernel.errors import EXIT_PREEMPTED


def lines(path: Path) -> list[dict[str, Any]]:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_the_run_folder(drive: Drive, recipe: Path, tmp_path: Path) -> None:
    ran = drive("train", recipe, "--out", "run", "--set", "recipe.width=8", "--seed", 3)
    assert ran.code == 0, ran.stderr
    run = tmp_path / "run"
    kinds = [record["event"] for record in lines(run / "metrics.jsonl")]
    assert kinds[0] == "run_started"
    assert kinds[-1] == "run_ended"
    assert {"logged", "evaluated", "saved"} < set(kinds)
    config = json.loads((run / "config.json").read_text())
    settings = config["settings"]
    assert settings["recipe.width"] == {"value": 8, "source": "command line"}
    assert settings["seed"] == {"value": 3, "source": "command line"}
    assert settings["steps"] == {"value": 6, "source": "recipe"}
    assert settings["max_grad_norm"]["source"] == "default"
    assert settings["backend.threads"]["source"] == "default"
    assert (config["backend"], config["world_size"]) == ("cpu", 1)
    assert (run / "sample.txt").read_text() == "a <sample>\n"
    assert (run / "checkpoints" / "checkpoint-000006" / "manifest.json").is_file()
    page = (run / "report.html").read_text()
    for part in ("finished at step 6", "a &lt;sample&gt;", "--resume run", "held_out", "MFU"):
        assert part in page
    assert page.count('<svg class="chart"') == 7
    assert "var(--line-1)" in page
    assert "currentColor" in page
    for own in ("http://www.w3.org", "<meta http-equiv=", 'protocol.startsWith("http")'):
        page = page.replace(own, "")
    assert "http" not in page


def test_plain_output_says_everything(drive: Drive, recipe: Path) -> None:
    ran = drive("train", recipe, "--out", "run")
    assert "\x1b" not in ran.stdout
    for part in ("step 6/6", "loss", "lr", "grad norm", "samples/s", "MFU", "FLOP/s", "a <sample>"):
        assert part in ran.stdout


def test_json_is_all_there_is_on_stdout(drive: Drive, recipe: Path) -> None:
    recipe.write_text(recipe.read_text() + "\nprint('noise')\n")
    loud = 'def sample(module):\n    import os\n    os.write(1, b"loud")\n    return "quiet"\n'
    recipe.write_text(recipe.read_text() + loud)
    ran = drive("train", recipe, "--out", "run", "--json")
    records = ran.records()
    assert records[-1]["event"] == "result"
    assert records[-1]["sample"] == "quiet"
    assert records[-1]["checkpoint"] == "run/checkpoints/checkpoint-000006"
    assert "loud" in ran.stderr


def test_a_loss_that_is_not_finite_is_valid_json(
    drive: Drive, recipe: Path, tmp_path: Path
) -> None:
    text = recipe.read_text().replace("** 2).sum()", "** 2).sum() * float('nan')")
    recipe.write_text(text)
    ran = drive("train", recipe, "--out", "run", "--set", "max_nonfinite=3")
    assert ran.code == 2
    skipped = [r for r in lines(tmp_path / "run/metrics.jsonl") if r["event"] == "step_skipped"]
    assert [record["in_a_row"] for record in skipped] == [1, 2, 3]
    assert skipped[0]["loss"] is None
    assert "failed: NonFiniteTraining" in (tmp_path / "run/report.html").read_text()


def test_a_recipe_file_names_observers_and_settings_stop(
    drive: Drive, recipe: Path, tmp_path: Path
) -> None:
    recipe.write_text(
        recipe.read_text()
        + "\n\ndef report(event):\n    print('observed', type(event).__name__)\n\n"
        + "observers = [report]\n"
    )
    never_better = ("stop.metric=held_out.loss", "stop.patience=1", "stop.min_change=1e9")
    words = [word for setting in never_better for word in ("--set", setting)]
    ran = drive("train", recipe, "--out", "run", "--set", "evaluate.every=1", *words)
    assert ran.code == 0, ran.stderr
    assert "observed Evaluated" in ran.stdout
    assert "stopped early: held_out.loss did not improve in the last evaluation" in ran.stdout
    ended = lines(tmp_path / "run/metrics.jsonl")[-1]
    assert (ended["step"], ended["reason"]) == (2, "stopped")


@pytest.mark.parametrize(
    ("observers", "words"),
    [("print", "it must be a list"), ("[Config]", "give an object of it: Config(...)")],
)
def test_observers_of_a_recipe_file_that_cannot_be(
    observers: str, words: str, drive: Drive, recipe: Path
) -> None:
    recipe.write_text(f"{recipe.read_text()}\n\nobservers = {observers}\n")
    ran = drive("train", recipe, "--out", "run")
    assert ran.code == 2
    assert words in " ".join(ran.stderr.split())


def test_epochs_lift_the_recipe_s_steps(drive: Drive, recipe: Path) -> None:
    ran = drive("train", recipe, "--out", "run", "--json", "--epochs", 2)
    assert ran.records()[-1]["step"] == 20


def test_resume_auto_appends_and_the_later_record_wins(
    drive: Drive, recipe: Path, tmp_path: Path
) -> None:
    first = drive("train", recipe, "--out", "run", "--set", "checkpoint.every=2", "--resume=auto")
    assert first.code == 0, first.stderr
    newest = tmp_path / "run/checkpoints/checkpoint-000006"
    (newest / "manifest.json").unlink()  # as if it had been killed while it saved
    before = lines(tmp_path / "run/metrics.jsonl")
    again = drive("train", recipe, "--out", "run", "--resume=auto", "--steps=8")
    assert again.code == 0, again.stderr
    after = lines(tmp_path / "run/metrics.jsonl")
    assert after[: len(before)] == before
    assert "steps was 6, is 8" in again.stdout

    from drivetrain.run.run_history import RunHistory

    assert [step for step, _ in RunHistory.of(after).figures("loss")] == [2, 4, 6, 8]


def test_a_run_goes_on_without_its_recipe_being_named(
    drive: Drive, recipe: Path, tmp_path: Path
) -> None:
    drive("train", recipe, "--out", "run", "--set", "recipe.width=8")
    ran = drive("train", "--resume", "run", "--steps", 8, "--json")
    assert ran.code == 0, ran.stderr
    assert ran.records()[-1]["step"] == 8
    settings = json.loads((tmp_path / "run/config.json").read_text())["settings"]
    assert settings["recipe.width"] == {"value": 8, "source": "resumed run"}
    checkpoint = "run/checkpoints/checkpoint-000006"
    other = drive("train", "--resume", checkpoint, "--steps", 7, "--out", "other", "--json")
    assert other.records()[-1]["checkpoint"] == "other/checkpoints/checkpoint-000007"


@pytest.mark.slow
def test_the_printed_command_goes_on_with_the_run(
    drive: Drive, recipe: Path, shell: Drive, tmp_path: Path
) -> None:
    first = drive("train", recipe, "--out", "run").stdout
    command = first.splitlines()[-1].strip()
    assert "--nproc 2" in command
    on_two_ranks = shell(command)
    assert on_two_ranks.code == 0, on_two_ranks.stderr
    assert "world size was 1, is 2" in on_two_ranks.stdout
    assert on_two_ranks.stdout.count("step 7/7") == 1
    words = on_two_ranks.stdout.splitlines()[-1].split()
    back = drive(*words[words.index("train") :])  # as `drivetrain` or by `python -m`
    assert "resumed at step 7" in back.stdout, back.stderr
    ends = [r["step"] for r in lines(tmp_path / "run/metrics.jsonl") if r["event"] == "run_ended"]
    assert ends == [6, 7, 8]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_signal_saves_and_has_its_own_exit_code(
    ranks: int, drive: Drive, recipe: Path, tmp_path: Path
) -> None:
    def stop(process: BaseProcess) -> None:
        os.kill(process.pid or 0, signal.SIGTERM)

    words = ["--out=run", "--steps=1000000", f"--nproc={ranks}", "--json"]
    ran = drive("train", recipe, *words, meanwhile=when_it_trains(tmp_path, stop))
    assert ran.code == EXIT_PREEMPTED
    result = ran.records()[-1]
    assert result["reason"] == "preempted"
    assert (tmp_path / result["checkpoint"] / "manifest.json").is_file()


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_stops_when_its_time_is_over(
    ranks: int, drive: Drive, recipe: Path, tmp_path: Path
) -> None:
    words = ["--out=run", "--steps=10000000", f"--nproc={ranks}", "--json", "--stop-after=0.01m"]
    ran = drive("train", recipe, *words)
    assert ran.code == EXIT_PREEMPTED, ran.stderr
    result = ran.records()[-1]
    assert (result["reason"], result["step"] >= 1) == ("preempted", True)
    assert (tmp_path / result["checkpoint"] / "manifest.json").is_file()


@pytest.mark.parametrize("text", ["soon", "5x", "", "-3", "0m", "1h 2y"])
def test_a_time_that_is_none_is_refused(text: str, drive: Drive, recipe: Path) -> None:
    ran = drive("train", recipe, f"--stop-after={text}")
    assert ran.code == 2
    assert f"--stop-after is {text!r}" in ran.stderr


def test_the_default_run(drive: Drive) -> None:
    small = ("layers=1", "width=16", "heads=2", "context=16", "eval_sequences=4")
    sets = [word for pair in small for word in ("--set", f"recipe.{pair}")]
    ran = drive("train", "--steps", 3, "--json", *sets)
    assert ran.code == 0, ran.stderr
    result = ran.records()[-1]
    assert result["sample"]
    assert 7.5 < result["metrics"]["held_out"]["bits_per_byte"] < 8.5
    assert os.path.dirname(result["report"]).startswith("runs/gpt-")


def test_help_is_fast_and_names_the_exit_code(drive: Drive) -> None:
    imported = "import drivetrain.cli.app, sys; print(any(m == 'torch' for m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", imported], capture_output=True, check=True)
    assert done.stdout.strip() == b"False"
    shown = drive("train", "--help", COLUMNS="100").stdout
    assert f"{EXIT_PREEMPTED} asked to stop" in shown
    assert "--set optimizer.lr=3e-4" in shown


@pytest.mark.slow
def test_a_run_is_tracked_and_its_resumed_one_goes_on(
    drive: Drive, recipe: Path, tmp_path: Path
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = drive("train", recipe, "--backend", "cpu", "--track", "tensorboard", "--out", "run")
    assert first.code == 0, first.stderr
    again = drive("train", "--resume", "run", "--steps", "8")
    assert again.code == 0, again.stderr
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [point.step for point in events.Scalars("train/loss")] == [2, 4, 6, 8]
    assert drive("train", "--resume", "run", "--steps", "10", "--track", "none").code == 0
    after = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [point.step for point in after.Scalars("train/loss")] == [2, 4, 6, 8]
    wrong = drive("train", recipe, "--track", "tensorbord", "--out", "other")
    assert wrong.code == 2 and "known" in wrong.stderr
    assert not (tmp_path / "other").exists()


def test_each_rank_gets_its_share_of_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's parser gives each of several ranks one thread, unless they have a number."""
    seen = []

    def run(command: Any) -> None:
        seen.append(os.environ["OMP_NUM_THREADS"])

    monkeypatch.setattr("torch.distributed.run.run", run)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    with patch.dict(os.environ):
        del os.environ["OMP_NUM_THREADS"]
        run_ranks(Launch(nproc=2), ["train", "no_file.py"])
    assert seen == ["4"]
