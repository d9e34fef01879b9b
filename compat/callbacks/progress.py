"""Progress of a run: a bar, printed logs, or the table of a notebook."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from .base import TrainerCallback
from .state import TrainerControl, TrainerState

__all__ = [
    "DEFAULT_PROGRESS_CALLBACK",
    "PrinterCallback",
    "ProgressCallback",
    "StatisticsLog",
    "default_progress_callback",
]


class StatisticsLog(dict[str, Any]):
    """A log of `stats_steps`: eight figures for each parameter, which are not shown as text."""


class ProgressCallback(TrainerCallback):
    """A bar over the steps, one below it while predicting, and the logs written above them.

    Needs tqdm. `max_str_len`: longer strings in logs are replaced by a word about their length.
    """

    def __init__(self, max_str_len: int = 100) -> None:
        self.max_str_len = max_str_len
        self.training_bar: Any = None
        self.prediction_bar: Any = None

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            self.training_bar = _bar(total=state.max_steps)

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.training_bar is not None:
            self.training_bar.update(state.global_step - self.training_bar.n)

    def on_prediction_step(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        eval_dataloader: Any = None,
        **kwargs: Any,
    ) -> None:
        total = _length(eval_dataloader)
        if not state.is_world_process_zero or total is None:
            return
        if self.prediction_bar is None:
            self.prediction_bar = _bar(total=total, leave=self.training_bar is None)
        self.prediction_bar.update(1)

    def on_evaluate(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._close_prediction_bar()

    def on_predict(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._close_prediction_bar()

    def on_log(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if self.training_bar is not None and not isinstance(logs, StatisticsLog):
            self.training_bar.write(str(_shown(logs or {}, self.max_str_len)))

    def on_train_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.training_bar is not None:
            self.training_bar.close()
            self.training_bar = None

    def _close_prediction_bar(self) -> None:
        if self.prediction_bar is not None:
            self.prediction_bar.close()
            self.prediction_bar = None


class PrinterCallback(TrainerCallback):
    """Prints each log as a line."""

    def on_log(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if state.is_local_process_zero and not isinstance(logs, StatisticsLog):
            print(_shown(logs or {}))


DEFAULT_PROGRESS_CALLBACK = ProgressCallback
"""The progress callback outside of notebooks, if bars are on."""


def default_progress_callback(disable_tqdm: bool | None) -> type[Any]:
    """Return the class that shows progress: the printer if bars are off or tqdm is missing,
    transformers' table in a notebook, else the bar.
    """
    if disable_tqdm or importlib.util.find_spec("tqdm") is None:
        return PrinterCallback
    if _in_notebook() and importlib.util.find_spec("transformers") is not None:
        from transformers.utils.notebook import NotebookProgressCallback

        notebook: type[Any] = NotebookProgressCallback
        return notebook
    return ProgressCallback


def _in_notebook() -> bool:
    """True if a Jupyter kernel runs this process: IPython then has an application of its own."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and "IPKernelApp" in shell.config


def _bar(**options: Any) -> Any:
    from tqdm.auto import tqdm

    return tqdm(dynamic_ncols=True, **options)


def _length(loader: Any) -> int | None:
    """Return the number of batches; None for a stream of unknown length."""
    try:
        return len(loader)
    except TypeError:
        return None


def _shown(logs: dict[str, Any], longest: int | None = None) -> dict[str, Any]:
    """Format figures to four digits, without the count of operations; `logs` is not changed."""
    shown = {}
    for name, value in logs.items():
        if isinstance(value, float):
            value = f"{value:.4g}"
        elif isinstance(value, str) and longest is not None and len(value) > longest:
            value = f"[{len(value)} characters; max_str_len is {longest}]"
        if name != "total_flos":
            shown[name] = value
    return shown
