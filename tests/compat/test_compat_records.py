"""Records of a Trainer's run: what they hold, and by them reports, comparisons and replays."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from side_by_side import arguments, classifier, samples
from subjects import subject
from torch import Tensor
from typer.testing import CliRunner

from drivetrain import compat
from drivetrain.cli.app import app
from drivetrain.compat.errors import ArgumentError
from drivetrain.kernel.errors import DrivetrainError
from drivetrain.run.parted import compare_runs
from drivetrain.run.recorded_steps import read_steps
from drivetrain.run.run_folder import METRICS, REPORT
from drivetrain.run.run_history import HistoryFile, RunHistory

STEPS = {
    "max_steps": 10,
    "gradient_accumulation_steps": 2,
    "logging_steps": 2,
    "save_strategy": "steps",
    "save_steps": 4,
    "eval_strategy": "steps",
    "eval_steps": 6,
}


class Ends(compat.TrainerCallback):
    """Ends the run by an error after a step, as if it was killed, and requests a save then."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


class Stops(compat.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 3


class SavesAlways(compat.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = True


def trainer(
    folder: Any,
    *,
    kind: Any = compat.Trainer,
    dropout: float = 0.0,
    callbacks: Any = (),
    data: Any = None,
    **given: Any,
) -> Any:
    return kind(
        classifier(dropout),
        arguments(compat, folder, **{**STEPS, **given}),
        train_dataset=data or samples(16),
        eval_dataset=samples(4),
        callbacks=[*callbacks],
    )


def recorded(folder: Path, **given: Any) -> Path:
    """Train, and return the folder of the records."""
    trainer(folder, run_records=True, **given).train()
    return folder / "records"


def records_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]


def history_of(folder: Path) -> RunHistory:
    return HistoryFile(folder / METRICS).read()


def replayed(folder: Path, step: int, **given: Any) -> int:
    """Replay a step; return the exit code."""
    with pytest.raises(SystemExit) as ended:
        trainer(folder, replay_step=step, **given).train()
    assert type(ended.value.code) is int
    return ended.value.code


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# --- records ---------------------------------------------------------------------------------


def test_records_hold_the_run_and_logs_stay_as_they_are(tmp_path: Path) -> None:
    made = trainer(tmp_path / "a", run_records=True, dropout=0.2)
    made.train()
    plain = trainer(tmp_path / "b", dropout=0.2)
    plain.train()
    assert not (tmp_path / "b" / "records").exists()
    for mine, other in zip(made.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine, other)
    logs, others = (
        [
            {name: value for name, value in log.items() if not name.endswith(("time", "_second"))}
            for log in each.state.log_history
        ]
        for each in (made, plain)
    )
    assert logs == others
    history = history_of(tmp_path / "a" / "records")
    assert history.skipped == 0
    assert history.ended is not None and history.ended["reason"] == "finished"
    losses = dict(history.figures("loss"))
    rates = dict(history.figures("learning_rate"))
    norms = dict(history.figures("grad_norm"))
    for log in made.state.log_history:
        if "learning_rate" in log:
            step = log["step"]
            assert losses[step] == pytest.approx(log["loss"], abs=1e-4)
            assert rates[step] == log["learning_rate"]
            assert norms[step] == pytest.approx(log["grad_norm"])
    assert [row["step"] for row in history.rows] == [6, 10]
    assert {"loss"} <= history.rows[0]["metrics"].keys()
    assert (tmp_path / "a" / "records" / REPORT).is_file()


@pytest.mark.parametrize(
    ("given", "logged"),
    [
        ({"logging_strategy": "epoch"}, [2, 4, 6, 8, 10]),
        ({"logging_steps": 4, "logging_first_step": True}, [1, 4, 8]),
    ],
)
def test_each_logged_step_has_digests_of_its_samples_and_gradients(
    tmp_path: Path, given: dict[str, Any], logged: list[int]
) -> None:
    steps = read_steps(recorded(tmp_path, per_device_train_batch_size=4, **given)).steps
    assert [*steps] == logged
    for step in steps.values():
        assert step.digests["samples"] == 8
        assert step.gradients.keys() == step.weights.keys() == classifier().state_dict().keys()


def test_hours_add_up_over_a_restart(tmp_path: Path) -> None:
    given = {"run_records": True, "dropout": 0.2}
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "stopped", callbacks=[Ends(7)], **given).train()
    trainer(tmp_path / "stopped", **given).train(resume_from_checkpoint=True)
    folder = tmp_path / "stopped" / "records"
    found, seconds = records_of(folder), history_of(folder).lost.seconds()
    whole = found[-1]["time"] - found[0]["began"]
    # a record has the time of its line, and its figures that of a moment before
    assert sum(seconds.values()) == pytest.approx(whole, rel=0.01, abs=0.1)
    assert {"work done twice", "standing still", "saving", "evaluation"} <= seconds.keys()
    undisturbed = recorded(tmp_path / "whole", dropout=0.2)
    comparison = compare_runs(undisturbed, folder)
    assert comparison.steps == [2, 4, 6, 8, 10] and comparison.tolerance.exact
    assert not comparison.differences and not comparison.conditions


def test_sentences_on_the_time_name_arguments_of_the_trainer(tmp_path: Path) -> None:
    class Slow(compat.Trainer):
        def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
            time.sleep(0.05)
            return super().evaluation_loop(*args, **kwargs)

    folder = recorded(tmp_path, kind=Slow, logging_steps=1, eval_steps=2)
    texts = [each["text"] for each in history_of(folder).verdicts if each["kind"] == "evaluation"]
    assert len(texts) == 1 and "`eval_steps`" in texts[0] and "evaluate.every" not in texts[0]


def test_evaluations_count_for_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, passed = time.perf_counter, [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + passed[0])

    class Slow(compat.Trainer):
        def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
            passed[0] += 10_000  # more than any step takes on a busy machine
            return super().evaluation_loop(*args, **kwargs)

    given = {"logging_steps": 1, "eval_steps": 4, "save_steps": 99}
    found = records_of(recorded(tmp_path, kind=Slow, **given))
    seconds = {each["step"]: each["step_seconds"] for each in found if each["event"] == "logged"}
    assert passed[0] >= 20_000
    assert seconds[5] < 5_000 and seconds[9] < 5_000, seconds


def test_reports_are_recorded_too(tmp_path: Path) -> None:
    data = samples(16)
    data[5]["x"][1] = float("nan")
    reports = {"stats_steps": 2, "stats_activations": ["inn*"], "memory_parts": True}
    folder = recorded(tmp_path, data=data, find_nonfinite=True, **reports)
    history = history_of(folder)
    assert history.memory is not None
    assert "per_device_train_batch_size=1" in history.memory["remedies"]["activations"]
    assert history.not_finite and "batch['x'] is the first NaN" in history.not_finite[0]["text"]
    stats = [each for each in records_of(folder) if each["event"] == "stats"]
    assert [each["step"] for each in stats] == [2, 4, 6, 8, 10]
    assert stats[0]["activations"].keys() == {"inner"}
    assert stats[0]["parameters"].keys() == classifier().state_dict().keys()


def test_an_error_ends_the_report(tmp_path: Path) -> None:
    class Breaks(compat.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 5:
                raise ValueError("of a callback")

    with pytest.raises(ValueError, match="of a callback"):
        trainer(tmp_path, callbacks=[Breaks()], run_records=True).train()
    assert "ValueError: of a callback" in (tmp_path / "records" / REPORT).read_text()


# --- activations -----------------------------------------------------------------------------


def test_activations_are_in_the_logs_of_statistics(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    class Keeps(compat.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(kwargs["logs"])

    trainer(tmp_path, callbacks=[Keeps()], stats_steps=5, stats_activations=["inner"]).train()
    names = {name for log in seen for name in log if name.endswith("/inner")}
    kinds = ("mean", "std", "max_abs", "zeros", "nonfinite")
    assert names == {f"stats/{kind}/inner" for kind in kinds}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"stats_activations": ["inner"]}, "stats_steps is None"),
        ({"stats_activations": ["nothing*"], "stats_steps": 1}, "'nothing.*matches no module"),
        ({"replay_step": 0}, "replay_step is 0; it must be an integer above 0"),
    ],
)
def test_invalid_requests_are_refused(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        trainer(tmp_path, **given).train()


# --- a replay --------------------------------------------------------------------------------


@pytest.mark.parametrize(("step", "since"), [(2, 0), (6, 4), (10, 8)])
def test_a_replay_is_equal_bit_for_bit_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], step: int, since: int
) -> None:
    recorded(tmp_path, dropout=0.2)
    before = files_of(tmp_path)
    capsys.readouterr()
    assert replayed(tmp_path, step, dropout=0.2, callbacks=[SavesAlways()]) == 0
    said = capsys.readouterr().out
    source = tmp_path / f"checkpoint-{since}" if since else "the start"
    assert f"step {step} again with cpu, {step - since} steps from {source}\n" in said
    assert "equal bit for bit" in said
    assert files_of(tmp_path) == before


def test_a_sample_that_was_changed_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given: dict[str, Any] = {"train_sampling_strategy": "sequential"}
    recorded(tmp_path, per_device_train_batch_size=2, **given)
    data = samples(16)
    data[5]["x"][0] += 1.0  # of step 6: samples 4 to 7 of the second epoch
    assert replayed(tmp_path, 6, data=data, per_device_train_batch_size=2, **given) == 1
    said = capsys.readouterr().out
    assert "step 6: samples (1 of 4 in the global batch" in said
    assert "gradient inner.weight" in said and "weight outer.bias" in said


def test_another_argument_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(tmp_path, weight_decay=0.1)
    assert replayed(tmp_path, 3 * 2, weight_decay=0.1, max_grad_norm=0.01) == 1
    said = capsys.readouterr().out
    assert "step 6: weight" in said and "max_grad_norm: 1.0 and 0.01" in said


def test_a_wrong_weight_in_the_run_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Flips(compat.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 6:
                weight: Tensor = kwargs["model"].inner.weight.data
                weight[0, 0] = -weight[0, 0]

    recorded(tmp_path, callbacks=[Flips()])
    assert replayed(tmp_path, 6) == 1
    said = capsys.readouterr().out
    assert f"{tmp_path}/records and replay part at step 6: weight inner.weight" in said
    assert "outer.weight" not in said


@pytest.mark.parametrize(
    ("step", "given", "error", "said"),
    [
        (7, {}, ArgumentError, "no digests of this step; the nearest that it has are 6 and 8"),
        (4, {"callbacks": [Stops()]}, DrivetrainError, "training ended at step 3, before it"),
        (10, {"max_steps": 9}, DrivetrainError, "replay_step=10: training ended at step 9"),
    ],
)
def test_a_replay_that_cannot_be_made_says_why(
    tmp_path: Path, step: int, given: dict[str, Any], error: Any, said: str
) -> None:
    recorded(tmp_path)
    with pytest.raises(error, match=said):
        trainer(tmp_path, replay_step=step, **given).train()


def test_a_replay_needs_records(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"replay_step=2: .*train with run_records=True first"):
        trainer(tmp_path, replay_step=2).train()


# --- several ranks ---------------------------------------------------------------------------


def test_two_ranks_are_replayed_by_them_and_by_one_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import records_ranks

    def two(folder: Path, **given: Any) -> list[dict[str, Any]]:
        given = {"per_device_train_batch_size": 1, **given}
        return subject("ddp", 2).run(records_ranks.trained, folder=str(folder), **given)

    folder = tmp_path / "two"
    two(folder, run_records=True)
    one = recorded(tmp_path / "one", per_device_train_batch_size=2)
    ours, theirs = (read_steps(each).steps for each in (one, folder / "records"))
    assert [*ours] == [*theirs] == [2, 4, 6, 8, 10]
    for step, mine in ours.items():
        assert mine.digests["samples"] == theirs[step].digests["samples"] == 4
        assert mine.digests["batch"] == theirs[step].digests["batch"]
    first, second = two(folder, replay_step=6)
    assert first["code"] == second["code"] == 0
    assert "equal bit for bit" in first["printed"] and not second["printed"]
    assert replayed(folder, 6, per_device_train_batch_size=2) == 0
    assert "equal within rounding" in capsys.readouterr().out


def test_a_batch_of_fewer_samples_than_ranks_counts(tmp_path: Path) -> None:
    """Require that ranks train if a subclass counts their samples as one."""
    import records_ranks

    given = {"max_steps": 2, "eval_strategy": "no", "save_strategy": "no"}
    for changed in subject("ddp", 2).run(records_ranks.odd, folder=str(tmp_path), **given):
        assert changed


def test_the_command_line_reads_records_and_explains_replays(tmp_path: Path) -> None:
    folder = str(recorded(tmp_path))
    assert CliRunner().invoke(app, ["report", folder]).exit_code == 0
    equal = CliRunner().invoke(app, ["compare", folder, folder])
    assert equal.exit_code == 0 and "equal bit for bit" in equal.output
    refused = CliRunner().invoke(app, ["replay", folder, "--step", "2"])
    assert refused.exit_code == 2
    assert "run the script with replay_step=STEP" in " ".join(refused.output.split())
