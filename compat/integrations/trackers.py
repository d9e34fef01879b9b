"""Trackers: where logs are sent besides the screen, by the names that `report_to` takes.

With transformers installed its own callbacks are used, unchanged; without it TensorBoard alone.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from ..callbacks.base import TrainerCallback
from ..callbacks.flow_callbacks import DEFAULT_CALLBACKS
from ..callbacks.progress import default_progress_callback
from ..callbacks.state import TrainerControl, TrainerState

__all__ = [
    "TensorBoardCallback",
    "all_callbacks",
    "installed_trackers",
    "reporting_callbacks",
    "rewrite_logs",
]

_log = logging.getLogger(__name__)


def all_callbacks(args: Any, users: Iterable[Any] | None) -> list[Any]:
    """A Trainer's callbacks in their order: the default flow, the trackers, the user's, and what
    shows progress.
    """
    progress = default_progress_callback(args.disable_tqdm)
    return [*DEFAULT_CALLBACKS, *reporting_callbacks(args), *(users or ()), progress]


def reporting_callbacks(args: Any) -> list[Any]:
    """A callback for each name in `args.report_to`: "none" or "all", a name, or a list of names.

    Raises ValueError for an unknown name, and what the tracker raises when it is not installed.
    """
    names = args.report_to or []
    names = [names] if isinstance(names, str) else list(names)
    if not names or "none" in names:
        return []  # and transformers, which takes seconds to import, is not needed
    known = _their_callbacks()
    if "all" in names:
        names = installed_trackers()
    if unknown := [name for name in names if name not in known]:
        more = "" if len(known) > 1 else "; others need transformers: pip install transformers"
        raise ValueError(f"report_to={unknown}: there is {', '.join(sorted(known))}{more}")
    callbacks = [known[name]() for name in names]
    for callback in callbacks:
        if type(callback).__name__ == "TensorBoardCallback" and getattr(args, "logging_dir", None):
            callback.logging_dir = os.path.expanduser(args.logging_dir)
    return callbacks


def _their_callbacks() -> dict[str, Any]:
    if importlib.util.find_spec("transformers") is None:
        return {"tensorboard": TensorBoardCallback}
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    return dict(INTEGRATION_TO_CALLBACK)


def installed_trackers() -> list[str]:
    """Trackers whose packages are here."""
    if importlib.util.find_spec("transformers") is None:
        return ["tensorboard"] if importlib.util.find_spec("tensorboard") else []
    from transformers.integrations import integration_utils

    theirs: Any = integration_utils
    return list(theirs.get_available_reporting_integrations())


def rewrite_logs(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Keys as sections: `eval_x` is `eval/x`, `test_x` is `test/x`, any other is `train/...`."""

    def section(name: str) -> str:
        prefix, _, rest = name.partition("_")
        return f"{prefix}/{rest}" if prefix in ("eval", "test") and rest else f"train/{name}"

    return {section(name): value for name, value in logs.items()}


class TensorBoardCallback(TrainerCallback):
    """Writes logs for TensorBoard, on the first rank; needs the package tensorboard.

    The folder is the environment's TENSORBOARD_LOGGING_DIR, else `runs/<time>_<host>` in the
    output folder, with a trial's name below it during a search.
    """

    def __init__(self, tb_writer: Any = None) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise RuntimeError("report_to='tensorboard' writes its files: pip install tensorboard")
        self.tb_writer = tb_writer
        self.logging_dir = os.path.expanduser(os.environ.get("TENSORBOARD_LOGGING_DIR", ""))

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        config: Any = getattr(kwargs.get("model"), "config", None)
        writer = self._writer(args, state)
        writer.add_text("args", args.to_json_string())
        if hasattr(config, "to_json_string"):
            writer.add_text("model_config", config.to_json_string())

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        writer = self._writer(args, state)
        for name, value in rewrite_logs(kwargs["logs"]).items():
            if isinstance(value, int | float):
                writer.add_scalar(name, value, state.global_step)
            elif isinstance(value, str):
                writer.add_text(name, value, state.global_step)
            else:
                _log.warning("TensorBoard: %s is left out, %r is no number or text", name, value)
        writer.flush()

    def on_train_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.tb_writer is not None:
            self.tb_writer.close()
            self.tb_writer = None

    def _writer(self, args: Any, state: TrainerState) -> Any:
        """The open writer; one is opened where there is none."""
        if self.tb_writer is None:
            from torch.utils.tensorboard import SummaryWriter

            folder = Path(self.logging_dir or args.output_dir)
            if not self.logging_dir or state.trial_name:
                started = f"{datetime.now():%b%d_%H-%M-%S}_{socket.gethostname()}"
                folder = Path(args.output_dir, "runs", started, state.trial_name or "")
            self.logging_dir = str(folder)
            self.tb_writer = SummaryWriter(log_dir=str(folder))
        return self.tb_writer
