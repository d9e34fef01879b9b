"""Training: HF Trainer's methods around the kernel's loop."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...checkpoint.catalog import tidy
from ...kernel.batches import Position
from ...kernel.errors import CollectiveFailed, OutOfMemory
from ...kernel.events import Requests
from ...kernel.loop import TrainLoop
from ...trainer.late_ranks import ended_by, flight_records_kept
from ...trainer.preemption_notice import preempt_on_notice, refuse_present_files
from ...trainer.run_lock import RunLock
from ...trainer.signals import preempt_on_signals
from ..callbacks.jit_checkpoint import waits_for_signals
from ..callbacks.state import ExportableState, TrainerState
from ..checkpoints.model_files import buffer_shapes
from ..checkpoints.read_ahead import read_again
from ..common.overrides import refuse_uncalled
from ..data.lengths import has_length
from ..enums import SaveStrategy
from ..evaluation.outputs import TrainOutput
from ..integrations.hub import quiet_uploads
from ..profile import profile_of
from .diagnostics import Diagnostics
from .epochs import Epochs, RunLength, no_batches
from .finalizing import FinalizingMixin
from .memory import lacks_memory, name_largest_parts, smaller_batch, what_to_do
from .partitioning import whole_sequences
from .replay import Replay
from .step_callbacks import TrainerPolicy

__all__ = ["TrainingMixin"]

_LOG = logging.getLogger(__name__)


class TrainingMixin(FinalizingMixin):
    """`train` and the methods that it calls."""

    # --- train ------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
        **kwargs: Any,
    ) -> TrainOutput:
        """Train to the end. `resume_from_checkpoint`: a path, or True for the newest in
        `output_dir`.

        Raises ValueError if the checkpoint does not exist, and `SaveFailed` at the end if
        checkpoints should have been saved but none could be.
        """
        resume_from_checkpoint = _old_model_path(resume_from_checkpoint, kwargs)
        refuse_uncalled(type(self), vars(self))
        refuse_present_files(_notices(self.args))
        self._memory_tracker.start()
        self.is_in_train = True
        self._hp_search_setup(trial)  # first: a trial may change the seed
        if self.model_init is not None:
            self._rebuild(trial)
        self._num_saved, self._save_error, self._saved_step = 0, None, None
        self._make_ready()
        self._buffer_shapes = buffer_shapes(self.model)
        quiet = quiet_uploads() if self.args.push_to_hub else contextlib.nullcontext()
        replay = self._replay = Replay.of(self.args, Path(self._get_output_dir(trial)))
        if replay is not None:
            resume_from_checkpoint = replay.checkpoint
        with self._locked_output(trial), quiet:
            checkpoint = self._checkpoint_to_resume(resume_from_checkpoint or None)
            if checkpoint is not None:
                self._load_from_checkpoint(checkpoint)
            output = self._within_memory(
                args=self.args,
                resume_from_checkpoint=checkpoint,
                trial=trial,
                ignore_keys_for_eval=ignore_keys_for_eval,
            )
        self._refuse_unsaved()
        return output

    @contextlib.contextmanager
    def _locked_output(self, trial: Any) -> Iterator[None]:
        """Lock the output folder: no other process may train with checkpoints in it, but other
        Trainers of this process may. Raises `OutputError`, naming the holder of the lock.
        """
        if self.args.save_strategy == SaveStrategy.NO or self._replay is not None:
            yield
            return
        lock = self._lock = RunLock(Path(self._get_output_dir(trial)))
        try:
            lock.take(self.driver_session.session, _LOG.warning)
            if self.driver_session.world.rank == 0:
                tidy(lock.folder)  # left by a killed process
            with flight_records_kept(lock.folder):
                yield
        finally:
            lock.release()
            self._lock = None

    def _within_memory(self, args: Any, **kwargs: Any) -> TrainOutput:
        """Run the training loop. With `auto_find_batch_size`, continue with a smaller batch, and
        more batches per update, each time that memory runs out.
        """
        batch_size, accumulation = self._train_batch_size, args.gradient_accumulation_steps
        self._training = None
        if args.auto_find_batch_size and args.train_batch_size % batch_size == 0:
            # an earlier run may have found it
            args.gradient_accumulation_steps *= args.train_batch_size // batch_size
        try:
            while True:
                try:
                    return self._inner_training_loop(
                        batch_size=self._train_batch_size, args=args, **kwargs
                    )
                except Exception as error:
                    size = self._batch_size_after(error)
                factor = self._train_batch_size // size
                self._interrupted = self._training
                self.model.zero_grad()
                self._train_batch_size = size
                args.gradient_accumulation_steps *= factor
        finally:
            self._interrupted = self._diagnostics = None
            args.gradient_accumulation_steps = accumulation
            if not args.auto_find_batch_size:
                self._train_batch_size = batch_size

    def _batch_size_after(self, error: Exception) -> int:
        """Return the batch size to continue with after this error. The error is raised again unless
        memory ran out on all ranks: otherwise the other ranks wait for this one, and abort."""
        args, size, step = self.args, self._train_batch_size, self.state.global_step + 1
        if isinstance(error, CollectiveFailed):
            raise error  # caused by another rank's error
        if not lacks_memory(error):
            self.driver_session.abort_ranks(ended_by(args.process_index, error), retry=False)
            raise error
        found = f"rank {args.process_index} ran out of memory in step {step} with batches of {size}"
        cause = str(error).partition("\n")[0]
        largest = name_largest_parts(error, self._diagnostics)
        message = f"{found} ({cause}): {what_to_do(args, size)}{largest}"
        together = self.driver_session.abort_ranks(message, retry=args.auto_find_batch_size)
        if not args.auto_find_batch_size or isinstance(error, OutOfMemory):
            raise error
        if not together:
            raise OutOfMemory(message) from error
        less = smaller_batch(size, error)
        _LOG.warning(
            "%s: continuing with %s, and %s times as many per update: the global batch stays%s",
            found,
            less,
            size // less,
            largest,
        )
        return less

    def _rebuild(self, trial: Any) -> None:
        """Make a new model, and drop optimizer and schedule."""
        self._seed()
        self.model = self.call_model_init(trial)
        self.optimizer = self.lr_scheduler = None
        if self.place_model_on_device:
            self._move_model_to_device(self.model, self.args.device)
        self.model_wrapped = self.model

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Prepare everything, and train with batches of this size by the kernel's loop."""
        self._train_batch_size = batch_size or self._train_batch_size
        loader = self.get_train_dataloader()
        length = RunLength(*self.set_initial_training_values(args, loader))
        reports = self._diagnostics = Diagnostics.of(self, trial)
        begun = self._init_training_state(
            length.max_steps,
            length.updates_per_epoch,
            length.num_epochs,
            resume_from_checkpoint,
            trial,
        )
        model, loader = self._prepare_for_training(length.max_steps, loader, resume_from_checkpoint)
        self._check_wrapped(model)
        if reports is not None:
            reports.begin()
        epochs = self._training_data = self._epochs(loader, length)
        start_time = time.time()
        policy = TrainerPolicy(
            self,
            epochs,
            reports,
            trial=trial,
            ignore_keys_for_eval=ignore_keys_for_eval,
            start_time=start_time,
        )
        data, mark = (
            (epochs, policy.mark) if reports is None else reports.watched(epochs, policy.mark)
        )
        training = self._training = TrainLoop(
            self._recipe(policy),
            self.driver_session.session,
            self.driver_session.engine,
            data,
            length.max_steps,
            policy,
            Requests(),
            mark,
        )
        try:
            self._resume(training, epochs, resume_from_checkpoint, begun)
            self._announce(length)
            self.control = self.callback_handler.on_train_begin(args, self.state, self.control)
            if args.eval_on_start:
                self._evaluate(trial, ignore_keys_for_eval, skip_scheduler=True)
            waits = waits_for_signals(self.callback_handler.callbacks)
            signals = preempt_on_signals(training.requests) if waits else None
            if (records := self._records) is not None and policy.times is not None:
                records.start(training, epochs, length, policy.times)
            watching = contextlib.nullcontext() if reports is None else reports.watching(training)
            notices = preempt_on_notice(_notices(args), training.requests)
            with signals or contextlib.nullcontext(), notices, watching:
                policy.run(training)
            training.resolve_pending_outcome()
            if records is not None:
                records.end(training.progress.step, policy.reason.value, time.time() - start_time)
            return self._finalize_training(trial, length.num_train_samples, start_time)
        except BaseException as error:
            if self._records is not None:
                self._records.fail(error)
            raise
        finally:
            policy.close()

    def _recipe(self, policy: TrainerPolicy) -> Any:
        return self.driver_session.recipe(self.model, step=policy.step)

    def _epochs(self, loader: Any, length: RunLength) -> Epochs:
        return Epochs(
            self,
            loader,
            accumulation=self.args.gradient_accumulation_steps,
            batches_per_epoch=length.batches_per_epoch,
            updates_per_epoch=length.updates_per_epoch,
            num_epochs=length.num_epochs,
            global_batch=length.total_batch // self.args.gradient_accumulation_steps,
            start_over=self.args.ignore_data_skip,
            before_partition=whole_sequences(self),
        )

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        """Set the state at the start, or from a checkpoint. Return the epochs that were trained,
        and the batches of the next epoch.
        """
        if self._interrupted is not None:
            self.state.train_batch_size = self._train_batch_size
        else:
            self._reset_state(trial, max_steps)
            if resume_from_checkpoint is not None:
                self._load_trainer_state(Path(resume_from_checkpoint))
        self.state.init_training_references(self, max_steps, num_train_epochs, trial)
        return self._trained(num_update_steps_per_epoch)

    def _trained(self, updates_per_epoch: int) -> tuple[int, int]:
        epochs, updates = divmod(self.state.global_step, updates_per_epoch)
        skipped = 0 if self.args.ignore_data_skip else updates
        return epochs, skipped * self.args.gradient_accumulation_steps

    def _reset_state(self, trial: Any, max_steps: int) -> None:
        stateful = [*self.callback_handler.callbacks, self.control]
        self.state = TrainerState(
            stateful_callbacks=[each for each in stateful if isinstance(each, ExportableState)]
        )
        self.state.is_hyper_param_search = trial is not None
        self.state.train_batch_size = self._train_batch_size
        self.state.compute_steps(self.args, max_steps)

    def _check_wrapped(self, model: Any) -> None:
        if model is not self.driver_session.engine.module:
            raise TypeError(
                f"{type(self).__name__}._prepare_for_training returned another model than "
                f"{self.driver_session.driver.name} has wrapped, which would not be trained: "
                "change self.model before it calls super()._prepare_for_training()"
            )

    def _resume(
        self, training: TrainLoop, epochs: Epochs, checkpoint: str | None, begun: tuple[int, int]
    ) -> None:
        """Restore a checkpoint, or the state after an out-of-memory error. `begun`: the epochs, and
        the batches of the next epoch, that count as trained; a subclass may have changed them.
        """
        left = self._interrupted
        if left is not None:
            training.progress, training.window = left.progress, left.window
        elif checkpoint is not None:
            self._resume_training(training, checkpoint)
        moved = begun != self._trained(epochs.updates_per_epoch)
        if moved:
            epoch, batches = begun
            training.progress.position = Position(epoch, batches * epochs.global_batch)
        if training.progress.position.samples:
            epochs.around_first = read_again(training.session, None if moved else checkpoint)
        self.state.global_step = training.progress.step
        if left is not None:
            return
        self._initial_num_input_tokens_seen = self.state.num_input_tokens_seen
        self._initial_global_step = self.state.global_step
        self._globalstep_last_logged = training.window.first_step
        self._total_loss_scalar = -self._loss_since_last_log()  # from the resumed run

    def _announce(self, length: RunLength) -> None:
        args = self.args
        _LOG.info("***** Running training *****")
        for name, value in {
            "Num examples": length.num_examples,
            "Num Epochs": length.num_epochs,
            "Num update steps per epoch": length.updates_per_epoch,
            "Instantaneous batch size per device": args.per_device_train_batch_size,
            "Total train batch size (with ranks and accumulation)": length.total_batch,
            "Gradient Accumulation steps": args.gradient_accumulation_steps,
            "Total optimization steps": length.max_steps,
            "Number of trainable parameters": self.get_num_trainable_parameters(),
        }.items():
            _LOG.info("  %s = %s", name, f"{value:,}")
        if step := self.state.global_step:
            at = self._running().progress.position
            _LOG.info("  resuming after step %s, sample %s of epoch %s", step, at.samples, at.epoch)

    def set_initial_training_values(
        self, args: Any, dataloader: Any, total_train_batch_size: int | None = None
    ) -> tuple[Any, ...]:
        """Return epochs, updates per epoch, examples, total samples, samples per update, batches
        per epoch and total updates. Raises ValueError if nothing sets the length of training.
        """
        accumulation, max_steps = args.gradient_accumulation_steps, args.max_steps
        total = self.get_total_train_batch_size(args)
        length = len(dataloader) if has_length(dataloader) else None
        if length == 0:
            raise no_batches(self.num_examples(dataloader))
        if not length and max_steps <= 0:
            raise ValueError(
                "the training data has no length, so max_steps has to set the number of updates; "
                f"it is {max_steps}"
            )
        if not length:
            samples, batches = max_steps * total, max_steps * accumulation
            return sys.maxsize, max_steps, samples, samples, total, batches, max_steps
        whole, rest = divmod(length, accumulation)
        short = rest > 0 and profile_of(args).ends_epochs_with_short_update
        updates = max(whole + short, 1)
        examples = self.num_examples(dataloader)
        if max_steps > 0:
            epochs, samples = math.ceil(max_steps / updates), max_steps * total
        else:
            max_steps = math.ceil(args.num_train_epochs * updates)
            epochs, samples = math.ceil(args.num_train_epochs), examples * args.num_train_epochs
        return epochs, updates, examples, samples, total, length, max_steps


def _notices(args: Any) -> list[str]:
    """Return the notices of preemption. Arguments of another library have none."""
    return getattr(args, "preemption_notice", None) or []


def _old_model_path(resume: str | bool | None, kwargs: dict[str, Any]) -> str | bool | None:
    if "model_path" in kwargs:
        _LOG.warning("train(model_path=...) is the old name of resume_from_checkpoint")
        resume = kwargs.pop("model_path")
    if kwargs:
        raise TypeError(f"train() got unexpected keyword arguments: {', '.join(kwargs)}")
    return resume
