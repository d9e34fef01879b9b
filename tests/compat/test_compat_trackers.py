"""Trackers: what `report_to` gives, our TensorBoard beside theirs, and theirs on our handler."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from side_by_side import ours
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers.integrations import integration_utils

from drivetrain.compat import (
    CallbackHandler,
    DefaultFlowCallback,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from drivetrain.compat.integrations.trackers import (
    TensorBoardCallback,
    all_callbacks,
    reporting_callbacks,
    rewrite_logs,
)

LOGS = [
    {"loss": 2.0, "learning_rate": 1e-3, "epoch": 0.5},
    {"eval_loss": 1.5, "eval_accuracy": 0.5, "epoch": 1},
    {"train_runtime": 3.0, "train_loss": 1.75, "test_f1": 0.25, "name": "words"},
]


def reporting(report_to: Any, **more: Any) -> list[str]:
    callbacks = reporting_callbacks(SimpleNamespace(report_to=report_to, **more))
    return [type(callback).__name__ for callback in callbacks]


@pytest.mark.row("G11")
def test_names_of_trackers() -> None:
    assert reporting(None) == reporting([]) == reporting("none") == []
    assert reporting("tensorboard") == reporting(["tensorboard"]) == ["TensorBoardCallback"]
    assert reporting(["mlflow", "trackio"]) == ["MLflowCallback", "TrackioCallback"]
    installed = integration_utils.get_available_reporting_integrations()
    assert {"tensorboard", "wandb", "mlflow", "trackio"} <= set(installed)
    assert len(reporting("all")) == len(installed)


@pytest.mark.row("C32", "G16")
def test_every_tracker_of_theirs_is_known_and_no_other() -> None:
    known = integration_utils.INTEGRATION_TO_CALLBACK
    with pytest.raises(ValueError, match=r"report_to=\['nobody'\]: there is") as refusal:
        reporting(["tensorboard", "nobody"])
    assert all(name in str(refusal.value) for name in known)
    assert len(known) >= 14


def test_the_folder_of_tensorboard_may_be_an_argument() -> None:
    args = SimpleNamespace(report_to="tensorboard", logging_dir="~/x")
    [callback] = reporting_callbacks(args)
    assert callback.logging_dir == str(Path("~/x").expanduser())


def test_without_transformers_there_is_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    for names in ("all", "tensorboard"):
        [callback] = reporting_callbacks(SimpleNamespace(report_to=names))
        assert type(callback) is TensorBoardCallback
    with pytest.raises(ValueError, match="others need transformers: pip install transformers"):
        reporting("wandb")
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert reporting("all") == []
    with pytest.raises(RuntimeError, match="pip install tensorboard"):
        reporting("tensorboard")


@pytest.mark.row("B2", "B27")
@pytest.mark.parametrize("quiet", [True, False])
def test_the_order_of_callbacks(quiet: bool) -> None:
    args = SimpleNamespace(report_to=["tensorboard"], disable_tqdm=quiet)
    users = [TrainerCallback, TrainerCallback()]
    handler = CallbackHandler(all_callbacks(args, users), None, None, None, None)
    names = [type(callback).__name__ for callback in handler.callbacks]
    last = (PrinterCallback if quiet else ProgressCallback).__name__
    user = TrainerCallback.__name__
    assert names == [DefaultFlowCallback.__name__, "TensorBoardCallback", user, user, last]
    assert all_callbacks(SimpleNamespace(report_to=None, disable_tqdm=quiet), None)


@pytest.mark.row("G12")
def test_a_run_has_no_name_unless_it_is_given(tmp_path: Path) -> None:
    for kind in (TrainingArguments, transformers.TrainingArguments):
        assert kind(output_dir=str(tmp_path), use_cpu=True).run_name is None
        assert kind(output_dir=str(tmp_path), use_cpu=True, run_name="x").run_name == "x"


@pytest.mark.row("G15")
def test_keys_become_sections_as_theirs() -> None:
    logs = {"eval_x": 1, "test_y": 2, "evaluate": 3, "eval": 4, "tests_z": 5, "train_loss": 6}
    assert rewrite_logs(logs) == integration_utils.rewrite_logs(logs)


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    return TrainingArguments(output_dir=str(folder), use_cpu=True, **more)


def run(args: Any, *callbacks: Any, model: Any = None, **state: Any) -> None:
    """A run as trackers see it."""
    flow = DefaultFlowCallback
    handler = CallbackHandler([flow, *callbacks], model or torch.nn.Linear(1, 1), None, None, None)
    stands, control = TrainerState(max_steps=3, **state), TrainerControl()
    control = handler.on_init_end(args, stands, control)
    control = handler.on_train_begin(args, stands, control)
    for step, logs in enumerate(LOGS, 1):
        stands.global_step = step
        control = handler.on_log(args, stands, control, logs=dict(logs))
    control = handler.on_save(args, stands, control)
    handler.on_train_end(args, stands, control)


def told(folder: Path) -> dict[str, Any]:
    """What the event files below a folder hold, by tag."""
    files = list(folder.rglob("events.*"))
    assert len(files) == 1
    events = EventAccumulator(str(files[0])).Reload()
    scalars = {t: [(e.step, e.value) for e in events.Scalars(t)] for t in events.Tags()["scalars"]}
    texts = [tag for tag in events.Tags()["tensors"] if "args" not in tag]
    return {"scalars": scalars, "texts": sorted(texts), "args": len(events.Tags()["tensors"])}


@pytest.mark.row("G13")
def test_our_tensorboard_writes_what_theirs_writes(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(num_hidden_layers=1)
    model = torch.nn.Linear(1, 1)
    model.config = config  # type: ignore[assignment]
    kinds = {"ours": TensorBoardCallback, "theirs": integration_utils.TensorBoardCallback}
    for name, kind in kinds.items():
        run(arguments(tmp_path / name), kind, model=model)
    ours, theirs = (told(tmp_path / name / "runs") for name in kinds)
    assert ours == theirs
    assert ours["scalars"]["train/loss"] == [(1, 2.0)]
    assert ours["scalars"]["eval/accuracy"] == [(2, 0.5)]
    assert "test/f1" in ours["scalars"]
    assert ours["texts"] == ["model_config/text_summary", "train/name/text_summary"]


@pytest.mark.row("G13")
def test_the_folder_of_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "set"))
    run(arguments(tmp_path / "a"), TensorBoardCallback)
    assert told(tmp_path / "set")["scalars"]
    run(arguments(tmp_path / "b"), TensorBoardCallback, trial_name="trial-7")
    assert told(tmp_path / "b" / "runs")["scalars"]
    assert list((tmp_path / "b" / "runs").glob("*/trial-7"))


@pytest.mark.row("G18")
def test_only_the_first_rank_reports(tmp_path: Path) -> None:
    run(arguments(tmp_path), TensorBoardCallback, is_world_process_zero=False)
    assert not list(tmp_path.rglob("events.*"))


@pytest.mark.row("G17")
def test_what_is_no_number_is_dropped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback, state = TensorBoardCallback(), TrainerState()
    args = arguments(tmp_path)
    with caplog.at_level(logging.WARNING):
        callback.on_log(args, state, TrainerControl(), logs={"a": [1], "loss": 1.0})
    callback.on_train_end(args, state, TrainerControl())
    assert "train/a is left out, [1] is no number" in caplog.text
    assert list(told(tmp_path)["scalars"]) == ["train/loss"]


@pytest.mark.row("G14")
def test_wandb_runs_offline_and_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    args = arguments(tmp_path, report_to="wandb", run_name="here")
    run(args, *reporting_callbacks(args))
    assert wandb.run is not None
    assert wandb.run.name == "here"
    summary = dict(wandb.run.summary)
    wandb.finish()
    assert summary["eval/loss"] == 1.5 and summary["train/global_step"] == 3
    assert list(tmp_path.rglob("*.wandb"))


@pytest.mark.row("G19")
@pytest.mark.parametrize("uploads", ["checkpoint", "end"])
def test_wandb_is_given_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uploads: str
) -> None:
    import wandb

    kept: list[tuple[str, set[str]]] = []
    log_artifact = wandb.Run.log_artifact

    def keeping(self: Any, artifact: Any, *args: Any, aliases: Any = None, **more: Any) -> Any:
        kept.append((aliases[-1], set(artifact.manifest.entries)))
        return log_artifact(self, artifact, *args, aliases=aliases, **more)

    monkeypatch.setattr(wandb.Run, "log_artifact", keeping)
    for name, value in {"MODE": "offline", "DIR": str(tmp_path), "SILENT": "true"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.setenv("WANDB_LOG_MODEL", uploads)
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "report_to": "wandb"}
    ours(tmp_path).trainer(**saving).train()
    wandb.finish()
    steps = [2, 4] if uploads == "checkpoint" else []
    whole = [f"checkpoint_global_step_{step}" for step in steps]
    assert [alias for alias, _ in kept] == ["base_model", *whole, "final_model"]
    assert all("model.safetensors" in files for _, files in kept[1:])
    assert all("manifest.json" in files for alias, files in kept if alias in whole)


@pytest.mark.row("G16")
@pytest.mark.filterwarnings("ignore:.*noload:DeprecationWarning")  # mlflow's own use of sqlalchemy
def test_mlflow_runs_on_files_and_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    store = f"sqlite:///{tmp_path / 'runs.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    args = arguments(tmp_path, report_to="mlflow")
    run(args, *reporting_callbacks(args))
    [found] = mlflow.MlflowClient(store).search_runs(["0"])
    assert found.data.metrics["eval_loss"] == 1.5
    assert found.data.params["output_dir"] == str(tmp_path)


@pytest.mark.row("G16")
@pytest.mark.slow
def test_trackio_runs_on_files_and_unchanged(tmp_path: Path) -> None:
    """In a process of its own: trackio takes its folder from the environment when imported."""
    script = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_compat_trackers import arguments, reporting_callbacks, run
args = arguments(Path("out"), report_to="trackio", project="small", run_name="here")
run(args, *reporting_callbacks(args))
"""
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio")}
    command = [sys.executable, "-c", script]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    with closing(sqlite3.connect(tmp_path / "trackio" / "small.db")) as base:
        rows = [json.loads(row) for (row,) in base.execute("SELECT metrics FROM metrics")]
    assert any(row.get("eval/loss") == 1.5 for row in rows)
