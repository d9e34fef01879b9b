"""Trackers: the real libraries, which write files on this machine."""

from __future__ import annotations

import errno
import json
import math
import os
import sqlite3
import struct
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from drivetrain import Recipe, Settings
from drivetrain.kernel.errors import OutputError, SettingError
from drivetrain.trackers import TRACKERS, Tracker
from drivetrain.trainer.fit import fit
from drivetrain.trainer.settings import CheckpointSettings, EvaluateSettings, StatsSettings

Curve = list[tuple[int, float]]


def recipe() -> Recipe:
    data = [(torch.tensor([float(i)]), torch.tensor([2.0 * i])) for i in range(8)]
    return Recipe(
        model=lambda: torch.nn.Linear(1, 1),
        loss=lambda module, batch: (module(batch[0]) - batch[1]).square().sum(),
        train_data=data,
        eval_data={"held_out": data[:4]},
    )


def settings(steps: int, **changes: Any) -> Settings:
    return Settings(
        **{
            "steps": steps,
            "global_batch": 4,
            "log_every": 1,
            "evaluate": EvaluateSettings(every=2),
            "checkpoint": CheckpointSettings(every=2),
            **changes,
        }
    )


def train_then_resume(out: Path, library: str, resume: str | Path = "auto") -> list[Any]:
    """Train four steps, resume from step 2 for two more, and return the announced losses."""
    seen: list[Any] = []
    fit(recipe(), settings(4), backend="cpu", out=out, observers=[Tracker(library), seen.append])
    again = out / "checkpoints" / "checkpoint-000002" if resume == "auto" else resume
    tracker = Tracker(library)
    fit(recipe(), settings(6), backend="cpu", out=out, resume=again, observers=[tracker])
    return [(e.step, e.loss) for e in seen if type(e).__name__ == "Logged"]


def scalars(folder: Path, tag: str) -> Curve:
    events = EventAccumulator(str(folder)).Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_goes_on_with_its_curve(tmp_path: Path) -> None:
    losses = train_then_resume(tmp_path / "run", "tensorboard")
    curve = scalars(tmp_path / "run" / "tensorboard", "train/loss")
    assert [step for step, _ in curve] == [1, 2, 3, 4, 5, 6]
    assert curve[:2] == [(s, pytest.approx(loss)) for s, loss in losses[:2]]
    evaluated = scalars(tmp_path / "run" / "tensorboard", "eval/held_out/loss")
    assert [step for step, _ in evaluated] == [2, 4, 6]


def test_statistics_are_sent_on_request(tmp_path: Path) -> None:
    for trackers in (False, True):
        out = tmp_path / str(trackers)
        asked = settings(2, stats=StatsSettings(every=1, trackers=trackers))
        fit(recipe(), asked, backend="cpu", out=out, observers=[Tracker("tensorboard")])
        tags = EventAccumulator(str(out / "tensorboard")).Reload().Tags()["scalars"]
        assert ("stats/weight/grad_norm" in tags) is trackers
    assert [step for step, _ in scalars(out / "tensorboard", "stats/bias/update_ratio")] == [1, 2]


def wandb_records(file: Path) -> Iterator[Any]:
    """Yield the records of an offline run. Its file consists of blocks of 32 KiB, made of parts
    with a head of checksum, length and kind (1: whole, 2 to 4: first, middle and last).
    """
    from wandb.proto import wandb_internal_pb2

    held, at, record = file.read_bytes(), 7, b""  # after the file's own head
    while at + 7 <= len(held):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        length, kind = struct.unpack_from("<HB", held, at + 4)
        record += held[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            found = wandb_internal_pb2.Record()
            found.ParseFromString(record)
            yield found
            record = b""


def test_wandb_goes_on_with_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    losses = train_then_resume(tmp_path / "run", "wandb")
    wandb.teardown()  # the process that writes the files may be late
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    assert len({file.stem for file in files}) == 1, "the second file is of another run"
    curves: list[Curve] = []
    for file in files:
        curve: Curve = []
        for record in wandb_records(file):
            row = {
                item.key or ".".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            if "train/loss" in row:
                curve.append((row["step"], row["train/loss"]))
        curves.append(curve)
    assert curves[0] == losses
    assert [step for step, _ in curves[1]] == [3, 4, 5, 6]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*noload:DeprecationWarning")  # mlflow's own use of sqlalchemy
def test_mlflow_goes_on_with_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    store = f"sqlite:///{tmp_path / 'runs.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    losses = train_then_resume(tmp_path / "run", "mlflow")
    client = mlflow.MlflowClient(store)
    (run,) = client.search_runs(["0"])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params["global_batch"] == "4"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted({point.step for point in history}) == [1, 2, 3, 4, 5, 6]
    assert sorted((p.step, p.value) for p in history)[:2] == losses[:2]


@pytest.mark.slow
def test_trackio_goes_on_with_its_run(tmp_path: Path) -> None:
    """Run in a process of its own: trackio reads its folder from the environment at import."""
    script = f"""
        import sys
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_trackers import train_then_resume
        train_then_resume(Path("run"), "trackio")
    """
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio")}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    with closing(sqlite3.connect(tmp_path / "trackio" / "drivetrain.db")) as base:
        rows = list(base.execute("SELECT run_name, step, metrics FROM metrics"))
    assert {name for name, _, _ in rows} == {"run"}
    assert {step for _, step, row in rows if "train/loss" in json.loads(row)} == set(range(1, 7))


def test_a_new_run_begins_a_new_curve(tmp_path: Path) -> None:
    for steps, out, resume in ((2, "a", None), (3, "b", tmp_path / "a" / "checkpoints")):
        fit(
            recipe(),
            settings(steps),
            backend="cpu",
            out=tmp_path / out,
            resume=resume,
            observers=[Tracker("tensorboard")],
        )
    assert [step for step, _ in scalars(tmp_path / "b" / "tensorboard", "train/loss")] == [3]


def test_a_roll_back_takes_the_curve_back(tmp_path: Path) -> None:
    from drivetrain.kernel import events

    tracker = Tracker("tensorboard", folder=tmp_path)
    seen: list[Any] = []
    fit(recipe(), settings(1), backend="cpu", observers=[seen.append])
    (started,) = [event for event in seen if isinstance(event, events.RunStarted)]
    (logged,) = [event for event in seen if isinstance(event, events.Logged)]
    tracker(started)
    values = vars(logged)
    tracker(events.Logged(**{**values, "step": 1, "loss": 5.0}))
    for _ in range(12):  # within a second
        for step, loss in ((2, 4.0), (3, math.nan)):
            tracker(events.Logged(**{**values, "step": step, "loss": loss}))
        tracker(events.RolledBack(1, tmp_path, 1))
    tracker(events.Logged(**{**values, "step": 2, "loss": 3.0}))
    tracker.close("finished")
    assert scalars(tmp_path / "tensorboard", "train/loss") == [(1, 5.0), (2, 3.0)]


def test_a_tracker_that_fails_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned: list[str] = []
    tracker = Tracker("tensorboard", warn=warned.append)

    def fail(*_: object) -> None:
        raise RuntimeError("its server is gone")

    monkeypatch.setattr("drivetrain.trackers.libraries.TensorBoard.log", fail)
    result = fit(recipe(), settings(3), backend="cpu", out=tmp_path, observers=[tracker])
    assert result.step == 3
    (message,) = warned
    assert "tensorboard" in message and "its server is gone" in message


@pytest.mark.parametrize("call", ["log", "start"])
def test_a_full_disk_ends_no_run(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fail every call of a tracker, its start included: a scheduler resumes runs even on a full
    disk.
    """
    warned: list[str] = []

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(f"drivetrain.trackers.libraries.TensorBoard.{call}", fail)
    tracker = Tracker("tensorboard", warn=warned.append)
    assert fit(recipe(), settings(3), backend="cpu", out=tmp_path, observers=[tracker]).step == 3
    (message,) = warned
    assert "tensorboard" in message and "No space left" in message


def test_what_cannot_be_tracked_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"tensorbord.*known.*tensorboard"):
        Tracker("tensorbord")
    (tmp_path / "trackers.json").write_text('{"tensorboard": 3}')
    with pytest.raises(OutputError, match="delete it to begin new curves"):
        fit(recipe(), settings(1), backend="cpu", out=tmp_path, observers=[Tracker("tensorboard")])


def test_all_names_are_of_libraries_that_are_run_here() -> None:
    assert set(TRACKERS) == {"mlflow", "tensorboard", "trackio", "wandb"}
