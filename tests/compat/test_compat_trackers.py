"""Trackers: the choice of `report_to`, and transformers' callbacks on compat's handler."""

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
from transformers.integrations import TensorBoardCallback, integration_utils

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
from drivetrain.compat.integrations.trackers import all_callbacks, reporting_callbacks

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


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    return TrainingArguments(output_dir=str(folder), use_cpu=True, **more)


def run(args: Any, *callbacks: Any, model: Any = None, **state: Any) -> None:
    """Run with a callback as trackers see it."""
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


def tracked(folder: Path) -> dict[str, Any]:
    """Return the content of the event file below a folder, by tag."""
    files = list(folder.rglob("events.*"))
    assert len(files) == 1
    events = EventAccumulator(str(files[0])).Reload()
    scalars = {t: [(e.step, e.value) for e in events.Scalars(t)] for t in events.Tags()["scalars"]}
    texts = [tag for tag in events.Tags()["tensors"] if "args" not in tag]
    return {"scalars": scalars, "texts": sorted(texts), "args": len(events.Tags()["tensors"])}


@pytest.mark.row("G13", "G15")
def test_tensorboard_gets_logs_by_section(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    model.config = transformers.LlamaConfig(num_hidden_layers=1)  # type: ignore[assignment]
    run(arguments(tmp_path), TensorBoardCallback, model=model)
    found = tracked(tmp_path / "runs")
    assert found["scalars"]["train/loss"] == [(1, 2.0)]
    assert found["scalars"]["eval/accuracy"] == [(2, 0.5)]
    assert "test/f1" in found["scalars"]
    assert found["texts"] == ["model_config/text_summary", "train/name/text_summary"]


@pytest.mark.row("G13")
def test_the_folder_of_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "set"))
    run(arguments(tmp_path / "a"), TensorBoardCallback)
    assert tracked(tmp_path / "set")["scalars"]
    trial = {"is_hyper_param_search": True, "trial_name": "trial-7"}
    run(arguments(tmp_path / "b"), TensorBoardCallback, **trial)
    assert tracked(tmp_path / "b" / "runs")["scalars"]
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
        callback.on_train_begin(args, state, TrainerControl())
        callback.on_log(args, state, TrainerControl(), logs={"a": [1], "loss": 1.0})
    callback.on_train_end(args, state, TrainerControl())
    assert '"train/a"' in caplog.text
    assert list(tracked(tmp_path)["scalars"]) == ["train/loss"]


@pytest.mark.slow
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


@pytest.mark.slow
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
    """Run in a process of its own: trackio reads its folder from the environment at import."""
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
