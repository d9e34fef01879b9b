"""Saves that fail without ending training, and a last step that is kept whatever fails after it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import nn

from ...data.user_frames import last_line
from ...kernel.errors import CollectiveFailed, SaveFailed
from ...trainer.late_ranks import ended_by
from ...trainer.step_clock import SAVING
from ..checkpoints.rotation import delete
from ..enums import SaveStrategy
from ..names import PREFIX_CHECKPOINT_DIR
from .diagnostics import Diagnostics
from .evaluation import EvaluationMixin
from .replay import Replay
from .run_records import RunRecords
from .search import SearchMixin
from .time_parts import TimeParts

__all__ = ["KeepingMixin"]

_LOG = logging.getLogger(__name__)


class KeepingMixin(EvaluationMixin, SearchMixin):
    """Saves a checkpoint if it can, and the last step before anything that follows it may fail."""

    _times: TimeParts | None = None
    """The account of the time of the current call of `train`."""
    _diagnostics: Diagnostics | None = None
    """The reports that arguments request in the current call of `train`."""
    _replay: Replay | None = None
    """The step that the current call of `train` trains again, instead of a run."""
    _saved_step: int | None = None
    """The last step of which this call of `train` has saved a checkpoint."""

    @property
    def _records(self) -> RunRecords | None:
        """The records of the current call of `train`, if it makes any."""
        return None if self._diagnostics is None else self._diagnostics.records

    def _timed(self, part: str) -> AbstractContextManager[None]:
        """Let the time of the block belong to a part of the time, if that is measured."""
        return nullcontext() if self._times is None else self._times.timed(part)

    @contextmanager
    def _open_to_writes(self, *methods: str) -> Iterator[None]:
        """Enclose a call of these methods: a subclass that overrides one may write to the model's
        weights in it; see `KeepsWrites`."""
        with ExitStack() as stack:
            for name in methods:
                where = f"{type(self).__name__}.{name}"
                code = getattr(self, name)
                stack.enter_context(self.driver_session.open_to_writes(code, where))
            yield

    def _try_to_save(self, model: nn.Module, trial: Any) -> bool:
        """Save a checkpoint, and return whether it was saved. A failure is logged, and training
        continues."""
        best = self.state.best_model_checkpoint
        try:
            with self._open_to_writes("_save_checkpoint", "save_model", "_save"):
                self._save_checkpoint(model, trial)
        except SaveFailed as error:
            self.state.best_model_checkpoint = best
            self._save_error = error
            _LOG.error("%s. Training continues", error)
            return False
        self._num_saved += 1
        self._saved_step = self.state.global_step
        return True

    def _refuse_unsaved(self) -> None:
        """Raises `SaveFailed` at the end of a run that should have saved checkpoints but could save
        none."""
        if self._save_error is not None and not self._num_saved:
            raise SaveFailed(
                f"the training ended at step {self.state.global_step}, and none of its checkpoints "
                f"could be saved; of the last: {self._save_error}. trainer.model has the trained "
                "weights: catch SaveFailed and call save_model() to keep them"
            ) from self._save_error

    # --- the last step ------------------------------------------------------------------------

    @contextmanager
    def _keeping_last_step(self, model: nn.Module, trial: Any) -> Iterator[None]:
        """Keep what was trained if the block, an evaluation, fails after the last step.

        HF's Trainer evaluates before it saves. One process saves when the block has failed. Ranks
        save before the block, without events, since they cannot save together once one has failed.
        """
        ahead = self._save_ahead(trial)
        if not self._is_at_end():
            yield
            return
        with self._saving_after_failure(model, trial, "the last evaluation"):
            yield
        if ahead is not None and not self.control.should_save:
            self._saved_step = None
            if self.args.should_save:
                delete(str(ahead), "save_strategy leaves this step out")

    def _is_at_end(self) -> bool:
        return bool(
            self.state.global_step >= self.state.max_steps or self.control.should_training_stop
        )

    def _is_kept(self) -> bool:
        """True if this step has a checkpoint, or is not to have one."""
        nothing = self.args.save_strategy == SaveStrategy.NO or self._replay is not None
        return nothing or self._saved_step == self.state.global_step

    def _save_ahead(self, trial: Any) -> Path | None:
        """Save the last step on several ranks, and return the folder; None if nothing was
        written."""
        step, session = self.state.global_step, self.driver_session.session
        if session.world.size == 1:
            return None
        folder = Path(self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{step}")
        is_last = self._is_at_end() and not self._is_kept()
        # callbacks may end training on some ranks alone, which takes effect later
        ranks = session.exchange([is_last, bool(self.control.should_save), folder.exists()])
        last, saved, there = zip(*ranks, strict=True)
        if not all(last) or (any(there) and not any(saved)):  # there: of an earlier run
            return None
        try:
            with self._timed(SAVING):
                self._write_checkpoint(folder, step)
        except SaveFailed as error:
            self._save_error = error
            _LOG.error("%s. The evaluation follows", error)
            return None
        self._record_save(trial)
        self._saved_step = step
        return folder

    def _record_save(self, trial: Any, error: SaveFailed | None = None) -> None:
        """Record the checkpoint of this step, or why it was not written, if that is requested."""
        if (records := self._records) is not None and self._times is not None:
            name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            records.saved(Path(self._get_output_dir(trial=trial), name), error, self._times)

    @contextmanager
    def _saving_after_failure(self, model: nn.Module, trial: Any, what: str) -> Iterator[None]:
        """If the block fails, save the last step unless it is saved, and log where the weights
        are."""
        try:
            yield
        except BaseException as error:
            self._save_after(error, model, trial)
            _LOG.error(
                "%s failed, after step %s: %s. %s",
                what,
                self.state.global_step,
                last_line(error),
                self._where(trial),
            )
            raise

    def _save_after(self, error: BaseException, model: nn.Module, trial: Any) -> None:
        if self._is_kept() or isinstance(error, CollectiveFailed):
            return
        rank, session = self.args.process_index, self.driver_session
        if session.abort_ranks(ended_by(rank, error), retry=True):
            self._try_to_save(model, trial)

    def _where(self, trial: Any) -> str:
        """Say where the trained weights are."""
        if self._saved_step == self.state.global_step:
            name = f"{PREFIX_CHECKPOINT_DIR}-{self._saved_step}"
            folder = Path(self._get_output_dir(trial=trial), name)
            return f"What was trained is saved in {folder}; trainer.model has the weights, too"
        why = "save_strategy is 'no'" if self.args.save_strategy == SaveStrategy.NO else "not saved"
        return (
            f"No checkpoint has this step ({why}): trainer.model has the trained weights, and "
            "trainer.save_model() keeps them"
        )
