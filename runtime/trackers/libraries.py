"""One class for each tracking library, with the calls of that library only."""

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
    """The start of a run, new or resumed."""

    folder: Path
    """The folder for local files of a library."""
    name: str
    config: Mapping[str, Any]
    """Settings by dotted key; JSON types."""
    first_step: int
    identity: str | None
    """The result of `start` when the run first began; None for a new run."""


class Library(Protocol):
    """A tracking library. It is created on rank 0 when a run starts; any method may raise the
    library's errors."""

    def start(self, run: Start) -> str:
        """Begin or continue a curve. Return the identity by which a later start continues it."""
        ...

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Log numbers by name, finite or not, at a step."""
        ...

    def roll_back(self, step: int) -> None:
        """Continue from a step as if later steps had not happened."""
        ...

    def end(self, reason: str) -> None:
        """End the run. `reason`: `finished`, `stopped`, `preempted` or `failed`."""
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

        # later steps, which a run wrote before it was resumed here, are hidden
        self._writer: Any = SummaryWriter(log_dir=self._folder, purge_step=purge_step)

    def log(self, figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def roll_back(self, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        # in the same file: files created within one second are read in any order
        again = SessionLog(status=SessionLog.START)
        self._writer.file_writer.add_event(Event(step=step + 1, session_log=again))

    def end(self, reason: str) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of wandb, configured by its environment variables (WANDB_PROJECT, WANDB_MODE, ...)."""

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
        # wandb's own step only increases, and a run may roll back to a checkpoint
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
    """A run of MLflow, configured by MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME."""

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
    """A run of Trackio, configured by TRACKIO_PROJECT and TRACKIO_DIR."""

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
