"""Saving checkpoints and models.

A `checkpoint-N` folder holds a checkpoint of the kernel, which any driver resumes at any world
size, and the files that `from_pretrained` and readers of HF's folders expect. The folder appears
atomically. `save_only_model` leaves the kernel's part out, and `checkpoint_format="hf"` writes HF
Trainer's files instead, for other tools.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from ...checkpoint import CheckpointStore, save_folder
from ...checkpoint.optimizer_entries import unsaved
from ...checkpoint.storage.local import replace_text
from ...data.indexed import length_of
from ...kernel.contract import Engine
from ...kernel.shards import Piece
from ...trainer.loop_state import loop_to_json
from ...trainer.start_checks import json_types
from ..arguments.backend import settings
from ..callbacks.state import TrainerState
from ..checkpoints import hf_folders
from ..checkpoints.earlier_files import copy_earlier_files
from ..checkpoints.extra_files import tensors_alone
from ..checkpoints.groups import aligned_schedule
from ..checkpoints.model_files import (
    RESHAPED,
    buffer_shapes,
    files_beside,
    frozen_names,
    is_pretrained,
    write_weights,
)
from ..checkpoints.read_ahead import with_read_ahead, with_workers
from ..checkpoints.rotation import delete, rotate_checkpoints, sort_checkpoints
from ..checkpoints.whole_optimizer import whole_optimizer
from ..common.json_state import to_plain
from ..enums import SaveStrategy
from ..errors import ArgumentRefused
from ..integrations.search_libraries import LIBRARIES
from ..names import PREFIX_CHECKPOINT_DIR, TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from ..optim.layerwise import LayerWiseDummyOptimizer
from ..optim.parameters import hyper_parameters
from ..profile import profile_of
from .hub import HubMixin
from .reporting import ReportingMixin
from .resuming import ResumingMixin

__all__ = ["CheckpointMixin"]

_LOG = logging.getLogger(__name__)


class CheckpointMixin(ResumingMixin, HubMixin, ReportingMixin):
    """`save_model` and `_save_checkpoint`, and the methods that they call."""

    # --- a model ------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model in the layout of `from_pretrained`, the processing class and the
        arguments.

        All ranks call it; ranks with `args.should_save` write. The model is pushed to the hub if
        `push_to_hub` is set, unless this is a part of a checkpoint.
        """
        output_dir = self.args.output_dir if output_dir is None else output_dir
        with self._whole_model() as whole:
            if whole is None:
                self._save(output_dir)
            else:
                self._save(output_dir, state_dict=whole.state_dict())
        if self.args.push_to_hub and not _internal_call:
            revision = getattr(self.args, "hub_revision", None)
            self.push_to_hub(commit_message="Model save", revision=revision)

    def _whole_model(self) -> AbstractContextManager[nn.Module | None]:
        """Gather the model from ranks that hold parts of it; None if it is not sharded."""
        if not self.driver_session.is_partitioned(self.model):
            return nullcontext()
        return self.driver_session.engine.full_params()

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Write the model's files on the ranks that save. `state_dict` replaces the model's own."""
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        if not self.args.should_save:
            return
        folder.mkdir(parents=True, exist_ok=True)
        _LOG.info("saving the model in %s", folder)
        weights = self.model.state_dict() if state_dict is None else state_dict
        tensors, left_out = tensors_alone(weights)
        if left_out:
            state_dict = tensors
            if not hf_folders.is_kernels(folder):
                _LOG.warning(
                    "%s lacks extra state of modules that is no tensor: %s. A checkpoint of the "
                    "run holds it, unless save_only_model or checkpoint_format='hf' is set",
                    folder,
                    ", ".join(left_out),
                )
        if is_pretrained(self.model):
            with files_beside(folder) as temporary:
                self.model.save_pretrained(str(temporary), state_dict=state_dict)
        else:
            write_weights(folder, tensors)
        processing = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if processing is not None:
            with files_beside(folder) as temporary:
                processing.save_pretrained(str(temporary))
        text = json.dumps(self.args.to_dict(), indent=2, sort_keys=True, default=str)
        replace_text(folder / TRAINING_ARGS_NAME, text + "\n")

    # --- a checkpoint -------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write `checkpoint-<step>`, push it if requested, and delete old checkpoints by the limit.

        Raises `SaveFailed` if it could not be written; earlier checkpoints are not changed then.
        """
        step = self.state.global_step
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        run_dir = self._get_output_dir(trial=trial)
        folder = Path(run_dir, f"{PREFIX_CHECKPOINT_DIR}-{step}")
        self._note_best_checkpoint(run_dir)
        self._write_checkpoint(folder, step)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(folder))
        if self.args.should_save:
            self._rotate_checkpoints(
                use_mtime=profile_of(self.args).rotates_by_time, output_dir=run_dir
            )

    def _write_checkpoint(self, folder: Path, step: int) -> None:
        if self.args.save_only_model or self._writes_hf_format():
            save_folder(folder, self.driver_session.session, partial(self._write_beside, folder))
        else:
            self._write_kernel_checkpoint(folder, step)

    def _write_kernel_checkpoint(self, folder: Path, step: int) -> None:
        running, data = self._running(), self._training_data
        engine = self.driver_session.engine
        state = loop_to_json(running)
        if begun := getattr(data, "begun", None):
            state["begun"] = begun(running.progress.position)
        state["data_length"] = length_of(self.train_dataset)
        state["optimizer_groups"] = [hyper_parameters(group) for group in engine.param_groups]
        shapes, before = buffer_shapes(self.model), self._buffer_shapes
        if reshaped := [name for name in shapes if shapes[name] != before.get(name)]:
            state[RESHAPED] = reshaped
        if self.lr_scheduler is not None:
            state["scheduler"] = self.lr_scheduler.state_dict()
        if unsaved := self._warn_of_unsaved_state():
            state["optimizer_unsaved"] = unsaved
        frozen = frozen_names(self.model)
        saved: Any = _Trained(engine, frozen) if frozen else engine
        ahead = getattr(data, "state_ahead", None)
        if ahead is not None and running.progress.position.samples:
            saved = with_read_ahead(saved, self.driver_session.session, ahead)
        of_workers = getattr(data, "worker_states", None)
        states = None if of_workers is None else of_workers(running.progress.position)
        if states is not None:
            saved = with_workers(saved, self.driver_session.session, states)
        guard = None if self._lock is None else self._lock.check_now
        store = CheckpointStore(folder.parent, digits=0, guard=guard)
        store.save(
            step,
            saved,
            self.driver_session.session,
            {name: to_plain(value, name) for name, value in state.items()},
            settings=json_types(settings(self.args)),
            driver=self.driver_session.driver.name,
            beside=partial(self._write_beside, folder),
        )
        store.wait()  # the replaced checkpoint is removed before callbacks are called

    def _warn_of_unsaved_state(self) -> list[str]:
        """Warn about optimizer state that the checkpoint will lack, and return its names."""
        unsaved = [] if self.optimizer is None else unsaved_state(self.optimizer)
        if unsaved:
            _LOG.warning(
                "this checkpoint cannot be resumed from: %s keeps %s where it cannot be saved. Its "
                "weights can be loaded",
                type(self.optimizer).__name__,
                ", ".join(unsaved),
            )
        return unsaved

    def _write_beside(self, folder: Path, place: Path) -> None:
        """Write all files except the kernel's to `place`, which will become `folder`. All ranks
        call it.
        """
        if self.is_world_process_zero():
            copy_earlier_files(folder, place)
        self.save_model(str(place), _internal_call=True)
        if self.args.should_save:
            self._collect_callback_states()
            self.state.save_to_json(place / TRAINER_STATE_NAME)

        if not self.args.save_only_model:
            self._save_optimizer_and_scheduler(str(place))
            self._save_scaler(str(place))
            self._save_rng_state(str(place))

    def _saves_kernel_checkpoints(self) -> bool:
        """True if the run saves checkpoints with all of its state."""
        args = self.args
        in_hf_format = getattr(args, "checkpoint_format", "drivetrain") == "hf"
        return args.save_strategy != SaveStrategy.NO and not (args.save_only_model or in_hf_format)

    def _writes_hf_format(self) -> bool:
        """True if it is requested, or if the kernel does not run the loop and so has nothing to
        save."""
        asked = getattr(self.args, "checkpoint_format", "drivetrain") == "hf"
        return asked or self._training is None

    def _collect_callback_states(self) -> None:
        stateful = [
            each
            for each in (*self.callback_handler.callbacks, self.control)
            if callable(getattr(each, "from_state", None)) and callable(each.state)
        ]
        self.state.stateful_callbacks = TrainerState(stateful_callbacks=stateful).stateful_callbacks

    # --- HF's own files -----------------------------------------------------------------------

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write `optimizer.pt` and `scheduler.pt`, unless the kernel has saved both and no subclass
        reads these files.
        """
        if self._kernel_holds(output_dir, "_load_optimizer_and_scheduler"):
            return
        if self.optimizer is None or not unsaved_state(self.optimizer):
            optimizer = self._optimizer_state(Path(output_dir))
            if self.args.should_save:
                hf_folders.save_optimizer(Path(output_dir), optimizer, self._schedule_state())
        elif self.args.should_save:
            self._warn_of_unsaved_state()

    def _optimizer_state(self, folder: Path) -> dict[str, Any] | None:
        """Return the whole optimizer state on the ranks that save. Called by all ranks."""
        session, optimizer = self.driver_session, self.optimizer
        if optimizer is None:
            return None
        prepared, own = session.prepared, {id(each) for each in self.model.parameters()}
        stepped = (id(each) for group in optimizer.param_groups for each in group["params"])
        if prepared is None or (not session.is_sharded() and not own.isdisjoint(stepped)):
            return optimizer.state_dict()
        if optimizer is not prepared.optimizer:
            raise ArgumentRefused(
                f"a checkpoint of {type(optimizer).__name__}, an optimizer of a loop of your own",
                session.driver.name,
                "it lies in parts on all ranks, and the driver knows another one: override "
                "create_optimizer, which is called when the driver wraps the model",
            )
        return whole_optimizer(
            prepared.engine, session.session, prepared.order, folder / "parts-of-optimizer"
        )

    def _schedule_state(self) -> dict[str, Any] | None:
        """Return the state of the schedule for the groups with which the optimizer was made."""
        if self.lr_scheduler is None:
            return None
        state, prepared = self.lr_scheduler.state_dict(), self.driver_session.prepared
        if prepared is None:
            return state
        whole: dict[str, Any] = aligned_schedule(state, prepared.order, len(prepared.order))
        return whole

    def _save_scaler(self, output_dir: str) -> None:
        """Write `scaler.pt` if there is a loss scaler, under the same conditions."""
        if self.driver_session.prepared is None or self._kernel_holds(output_dir, "_load_scaler"):
            return
        pieces = [piece for piece in self.driver_session.engine.shards() if piece.kind == "state"]
        if self.args.should_save:
            hf_folders.save_scaler(Path(output_dir), {piece.name: piece.tensor for piece in pieces})

    def _save_rng_state(self, output_dir: str) -> None:
        """Write this rank's random state, under the same conditions."""
        args = self.args
        if not self._kernel_holds(output_dir, "_load_rng_state"):
            hf_folders.save_random_state(Path(output_dir), args.process_index, args.world_size)

    def _kernel_holds(self, output_dir: str, loader: str) -> bool:
        """True if the kernel has written this state, and no subclass reads HF's file of it."""
        return hf_folders.is_kernels(Path(output_dir)) and not self._has_own(loader)

    # --- which checkpoints there are ----------------------------------------------------------

    def _get_output_dir(self, trial: Any) -> str:
        """Return the folder of checkpoints. In a search, each trial has its own in `output_dir`."""
        output_dir: str = self.args.output_dir
        if self.hp_search_backend is None or trial is None:
            return output_dir
        if self.hp_name is not None:
            return os.path.join(output_dir, self.hp_name(trial))
        return os.path.join(output_dir, f"run-{LIBRARIES[self.hp_search_backend].run_id(trial)}")

    def _note_best_checkpoint(self, run_dir: str) -> None:
        """Record the path of the best model, which may be the checkpoint about to be written."""
        state = self.state
        if self.args.save_strategy == SaveStrategy.NO or not state.best_global_step:
            return
        best = os.path.join(run_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}")
        if state.best_global_step == state.global_step or os.path.isdir(best):
            state.best_model_checkpoint = best

    def _sorted_checkpoints(
        self,
        output_dir: str | None = None,
        checkpoint_prefix: str = PREFIX_CHECKPOINT_DIR,
        use_mtime: bool = False,
    ) -> list[str]:
        """See `sort_checkpoints`."""
        return sort_checkpoints(
            output_dir or self.args.output_dir,
            checkpoint_prefix,
            use_mtime,
            self.state.best_model_checkpoint,
        )

    def _rotate_checkpoints(self, use_mtime: bool = False, output_dir: str | None = None) -> None:
        """See `rotate_checkpoints`; by `save_total_limit`."""
        rotate_checkpoints(
            output_dir or self.args.output_dir,
            self.args.save_total_limit,
            self.state.best_model_checkpoint,
            use_mtime,
        )

    def _keep_only_the_best(self, trial: Any) -> None:
        """At the end, with `save_total_limit=1`, keep only the best checkpoint."""
        best = self.state.best_model_checkpoint
        if not self.args.should_save or best is None or self.args.save_total_limit != 1:
            return
        for path in sort_checkpoints(self._get_output_dir(trial)):
            if Path(path) != Path(best):
                delete(path)


@dataclass(frozen=True)
class _Trained:
    """An engine without its frozen weights, as a checkpoint of adapters saves it."""

    engine: Engine
    frozen: frozenset[str]

    @property
    def tied(self) -> tuple[tuple[str, ...], ...]:
        return tuple(group for group in self.engine.tied if group[0] not in self.frozen)

    def shards(self) -> Iterator[Piece]:
        for piece in self.engine.shards():
            if piece.kind != "weights" or piece.name not in self.frozen:
                yield piece


def unsaved_state(optimizer: Any) -> list[str]:
    """Return the names of optimizer state that no checkpoint holds: objects that are neither tensor
    nor number (GaLore's projectors), and the internal state of optimizers inside backward.
    """
    if isinstance(optimizer, LayerWiseDummyOptimizer):
        states = [s for each in optimizer.optimizer_dict.values() for s in each.state.values()]
        return sorted({key for state in states for key in state})
    of_adalomo = {name for name in vars(optimizer) if name.startswith("exp_avg")}
    return sorted({*unsaved(optimizer), *of_adalomo})
