"""One class for each library: its own calls, and nothing of ours."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

__all__ = ["LIBRARIES", "Library", "Start"]


@dataclass(frozen=True)
class Start:
    """A run that begins, or goes on."""

    folder: Path
    """For what a library writes beside its server."""
    name: str
    config: Mapping[str, Any]
    """Settings by dotted key; JSON types."""
    first_step: int
    identity: str | None
    """The answer of `start` when the run began; None where it begins now."""


class Library(Protocol):
    """Made on rank 0 when a run starts. Any method may raise what the library raises."""

    def start(self, run: Start) -> str:
        """Begin, or go on with, a curve; the identity by which a later start goes on."""
        ...

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Numbers by name, finite or not, as of that step."""
        ...

    def roll_back(self, step: int) -> None:
        """The run goes on from that step, as if those after it had not been."""
        ...

    def end(self, reason: str) -> None:
        """`finished`, `stopped`, `preempted` or `failed`."""
        ...


class TensorBoard:
    """Event files in `tensorboard/` of the run folder; TENSORBOARD_LOGGING_DIR names another."""

    def __init__(self) -> None:
        import_module("tensorboard")

    def start(self, run: Start) -> str:
        own = os.environ.get("TENSORBOARD_LOGGING_DIR")
        self._folder = str(Path(own).expanduser() if own else run.folder / "tensorboard")
        self._open(run.first_step + 1 if run.identity else None)
        if run.identity is None:
            table = "\n".join(f"| {key} | {value} |" for key, value in run.config.items())
            self._writer.add_text("settings", f"| key | value |\n|---|---|\n{table}", 0)
        return self._folder

    def _open(self, purge_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # what was written from that step on, by a run that went on further, is not shown
        self._writer: Any = SummaryWriter(log_dir=self._folder, purge_step=purge_step)

    def log(self, figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def roll_back(self, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        # in the same file: of files begun in one second it is chance which is read first
        again = SessionLog(status=SessionLog.START)
        self._writer.file_writer.add_event(Event(step=step + 1, session_log=again))

    def end(self, reason: str) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of wandb: its environment (WANDB_PROJECT, WANDB_MODE, ...) says where."""

    def __init__(self) -> None:
        self._library: Any = import_module("wandb")

    def start(self, run: Start) -> str:
        self._run = self._library.init(
            project=os.environ.get("WANDB_PROJECT", "drivetrain"),
            name=os.environ.get("WANDB_NAME", run.name),
            id=run.identity,
            resume="allow" if run.identity else None,
            config=dict(run.config),
            dir=os.environ.get("WANDB_DIR", str(run.folder)),
        )
        # wandb's own step only rises, and a run may go back to a checkpoint
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        return str(self._run.id)

    def log(self, figures: Mapping[str, float], step: int) -> None:
        self._run.log({"step": step, **figures})

    def roll_back(self, step: int) -> None:
        pass

    def end(self, reason: str) -> None:
        self._run.finish(exit_code=int(reason == "failed"))


class Mlflow:
    """A run of MLflow: MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME say where."""

    def __init__(self) -> None:
        self._library: Any = import_module("mlflow")

    def start(self, run: Start) -> str:
        self._client = self._library.MlflowClient()
        if run.identity is not None:
            self._id = run.identity
            self._client.update_run(self._id, "RUNNING")
            return self._id
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
        experiment = self._client.get_experiment_by_name(name)
        known = experiment.experiment_id if experiment else self._client.create_experiment(name)
        self._id = str(self._client.create_run(known, run_name=run.name).info.run_id)
        for key, value in run.config.items():
            self._client.log_param(self._id, key, value)
        return self._id

    def log(self, figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            self._client.log_metric(self._id, name, value, step=step)

    def roll_back(self, step: int) -> None:
        pass

    def end(self, reason: str) -> None:
        states = {"failed": "FAILED", "preempted": "KILLED"}
        self._client.set_terminated(self._id, states.get(reason, "FINISHED"))


class Trackio:
    """A run of Trackio: TRACKIO_PROJECT and TRACKIO_DIR say where."""

    def __init__(self) -> None:
        self._library: Any = import_module("trackio")

    def start(self, run: Start) -> str:
        name = run.identity or run.name
        self._run = self._library.init(
            project=os.environ.get("TRACKIO_PROJECT", "drivetrain"),
            name=name,
            config=dict(run.config),
            resume="allow" if run.identity else "never",
        )
        return str(self._run.name)

    def log(self, figures: Mapping[str, float], step: int) -> None:
        self._run.log(dict(figures), step=step)

    def roll_back(self, step: int) -> None:
        pass

    def end(self, reason: str) -> None:
        self._run.finish()


LIBRARIES: Mapping[str, type[Library]] = {
    "mlflow": Mlflow,
    "tensorboard": TensorBoard,
    "trackio": Trackio,
    "wandb": WeightsAndBiases,
}
