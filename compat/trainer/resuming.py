"""Resuming: from checkpoints of the kernel, and from folders that HF Trainer wrote."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor

from ...checkpoint import MANIFEST, CheckpointReader, load_rng, own_random_state, read_manifest
from ...data.indexed import length_of
from ...kernel.batches import Position
from ...kernel.errors import CheckpointMismatch, printable
from ...kernel.loop import TrainLoop
from ...trainer.loop_state import loop_from_json
from ...trainer.module_state import ModuleState
from ...trainer.resume import differences
from ..arguments.backend import settings
from ..callbacks.state import TrainerControl, TrainerState
from ..checkpoints import hf_folders
from ..checkpoints.fitting import check_groups, check_schedule, refuse_part_of_optimizer
from ..checkpoints.groups import aligned, aligned_schedule, schedule_with_asked
from ..checkpoints.model_files import reshape_buffers
from ..checkpoints.overlay_reader import OverlayReader
from ..checkpoints.read_ahead import stored_workers
from ..checkpoints.resumed_values import differing, with_asked
from ..checkpoints.rotation import altered, newest_unaltered
from ..checkpoints.shards import Shards, check_names, read_shards
from ..common.json_state import from_plain
from ..common.overrides import is_overridden
from ..names import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from ..optim.layerwise import LayerWiseDummyOptimizer
from ..optim.parameters import hyper_parameters
from ..profile import profile_of
from .weights import WeightsMixin

__all__ = ["ResumingMixin"]

_LOG = logging.getLogger(__name__)


class ResumingMixin(WeightsMixin):
    """Loads checkpoints to resume from, and the best model."""

    # --- which checkpoint ---------------------------------------------------------------------

    def _checkpoint_to_resume(self, resume_from_checkpoint: str | bool | None) -> str | None:
        """Return the folder to resume from. True selects the newest sound checkpoint in
        `output_dir`.

        Raises ValueError if there is none, or if the given folder is not a checkpoint.
        """
        if not resume_from_checkpoint:
            return None
        session, path = self.driver_session.session, str(resume_from_checkpoint)
        if "://" in path:
            raise ValueError(f"Can't resume from {path}: it is a URL; copy it to a folder")
        if resume_from_checkpoint is True:
            path = newest_unaltered(session, self.args.output_dir)
        elif problems := altered(session, path):
            raise ValueError(f"Can't find a valid checkpoint at {path}: {problems[0]}")
        self._take_batch_size(Path(path))
        return path

    def _take_batch_size(self, folder: Path) -> None:
        """Continue with the batch size that was found before."""
        wanted = self.args.auto_find_batch_size or profile_of(self.args).resumes_batch_size
        if wanted and (folder / TRAINER_STATE_NAME).is_file():
            stored = TrainerState.load_from_json(folder / TRAINER_STATE_NAME).train_batch_size
            self._train_batch_size = stored or self._train_batch_size

    # --- everything else ----------------------------------------------------------------------

    def _resume_training(self, training: TrainLoop, checkpoint: str) -> None:
        """Restore a checkpoint: progress, state, optimizer, schedule, random state.

        The model is wrapped already. It already has the weights of a folder that HF Trainer wrote;
        the weights of a kernel checkpoint are read here.
        """
        folder = Path(checkpoint)
        if (folder / MANIFEST).is_file():
            self._resume_kernel(training, CheckpointReader(folder))
        else:
            training.progress = hf_folders.progress_at(self.state.global_step, self._training_data)
            training.start_window()
        self._load_optimizer_and_scheduler(checkpoint)
        self._load_scaler(checkpoint)
        self._load_rng_state(checkpoint)
        self._resume_workers(training, checkpoint)

    def _resume_workers(self, training: TrainLoop, checkpoint: str) -> None:
        """Restore the random state of data workers, or warn about random numbers that will
        differ."""
        args, position = self.args, training.progress.position
        stay = position.epoch and args.dataloader_persistent_workers
        if not args.dataloader_num_workers or not (position.samples or stay):
            return
        resume = getattr(self._training_data, "resume_workers", None)
        states = stored_workers(training.session, checkpoint)
        if states is not None and resume is not None and resume(position, states):
            return
        _LOG.warning(
            "dataloader_num_workers=%s: %s holds no random state of such data workers (see "
            "docs/reliability.md). From sample %s of epoch %s on, a data set or collator that "
            "draws random numbers in a worker draws others than the uninterrupted run. Data "
            "without random numbers are not affected",
            args.dataloader_num_workers,
            checkpoint,
            position.samples,
            position.epoch,
        )

    def _resume_kernel(self, training: TrainLoop, stored: CheckpointReader) -> None:
        """Restore a kernel checkpoint, except parts for which a subclass overrides a method; that
        method is called afterwards."""
        where = str(stored.folder)
        state = stored.manifest.loop_state(where)
        self._log_differences(stored)
        reshape_buffers(self.model, stored)
        late = is_overridden(type(self), "_load_optimizer_and_scheduler")
        kinds = ("weights", "state") if late else OverlayReader.kinds
        beside = self._weights_beside(stored)
        reader = OverlayReader(stored, beside, kinds=kinds) if beside or late else stored
        restoring = own_random_state(stored, training.session, self.driver_session.driver.name)
        with nullcontext() if is_overridden(type(self), "_load_rng_state") else restoring:
            training.restore(reader, *loop_from_json(state, training.session, where))
        modules = ModuleState(self.driver_session.engine, training.session, _LOG.warning)
        for note in modules.notes(stored, self.driver_session.driver.name):
            _LOG.warning("resuming: %s", note)
        if resume := getattr(self._training_data, "resume", None):
            resume(training.progress.position, state.get("begun"))
        self._warn_of_other_length(training.progress.position, state)

    def _load_trainer_state(self, folder: Path) -> None:
        path, fresh = folder / TRAINER_STATE_NAME, self.state
        if not path.is_file():
            return
        stored = TrainerState.load_from_json(path)
        best = stored.best_model_checkpoint
        if best is not None and not Path(best).is_dir():
            named = printable(best)[:400]
            _LOG.warning("the best checkpoint of the run that is resumed, %s, is gone", named)
            stored.best_model_checkpoint = None
        self.compare_trainer_and_checkpoint_args(self.args, stored)
        for name in ("logging_steps", "eval_steps", "save_steps", "train_batch_size"):
            setattr(stored, name, getattr(fresh, name))
        stored.is_hyper_param_search = fresh.is_hyper_param_search
        self.state = stored
        self._load_callback_state()

    def compare_trainer_and_checkpoint_args(
        self, training_args: Any, trainer_state: TrainerState
    ) -> None:
        """Warn once about arguments that differ from the checkpoint's run. The present arguments
        apply."""
        devices = max(1, training_args.n_gpu)
        then = {
            name: getattr(trainer_state, name)
            for name in ("logging_steps", "eval_steps", "save_steps")
        }
        then["per_device_train_batch_size"] = (trainer_state.train_batch_size or 0) // devices
        now = {name: getattr(training_args, name, None) or 0 for name in then}
        differing = [
            f"{name}: {now[name]} (from args) != {then[name]} (from trainer_state.json)"
            for name in then
            if then[name] and now[name] >= 1 and then[name] != now[name]
        ]
        if differing:
            _LOG.warning("other arguments than in the checkpoint: %s", "; ".join(differing))

    def _log_differences(self, reader: CheckpointReader) -> None:
        size = self.driver_session.session.world.size
        for each in differences(
            reader.manifest, settings(self.args), self.driver_session.driver.name, size
        ):
            _LOG.info("resuming: %s", each)

    def _warn_of_other_length(self, position: Position, state: Mapping[str, Any]) -> None:
        """Warn if a begun epoch continues in another order since the data changed, as with HF's
        Trainer."""
        then, now = state.get("data_length"), length_of(self.train_dataset)
        skips = position.samples and not self.args.ignore_data_skip
        if None in (then, now) or then == now or not skips:
            return
        _LOG.warning(
            "train_dataset had %.20s samples, and has %s, in another order. As many batches of "
            "epoch %s are skipped as were trained on: some samples come twice in it, and some not "
            "at all. To start that epoch over set ignore_data_skip=True; a recipe of drivetrain "
            "finishes it in the order in which it was begun",
            then,
            now,
            position.epoch,
        )

    def _load_callback_state(self) -> None:
        """With `restore_callback_states_from_checkpoint`, replace callbacks by restored ones of the
        same class.
        """
        if not self.args.restore_callback_states_from_checkpoint:
            return
        callbacks, lost = self.callback_handler.callbacks, []
        for name, stored in self.state.stateful_callbacks.items():
            states = stored if isinstance(stored, list) else [stored]
            if name == TrainerControl.__name__:
                self.control = type(self.control).from_state(states[0])
                continue
            places = [i for i, each in enumerate(callbacks) if type(each).__name__ == name]
            for place, state in zip(places, states, strict=False):
                callbacks[place] = type(callbacks[place]).from_state(state)
            if not places:
                lost.append(name)
        if lost:
            _LOG.warning(
                "the checkpoint holds the state of callbacks that this run does not have: %s",
                printable(", ".join(lost))[:400],
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Restore the learning rate schedule, and from HF's folders the optimizer: both, or neither
        if one of the files is missing.
        """
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        asked = [hyper_parameters(group) for group in self._optimizer_there_is().param_groups]
        if (folder / MANIFEST).is_file():
            state = from_plain(read_manifest(folder).state)
            refuse_part_of_optimizer(folder, state.get("optimizer_unsaved"))
            if self._training is None or is_overridden(type(self), "_load_optimizer_and_scheduler"):
                stored = CheckpointReader(folder)
                reader = OverlayReader(stored, self._weights_beside(stored))
                self.driver_session.engine.restore(reader)
            groups, schedule = self._for_groups_here(
                state.get("optimizer_groups", []), state.get("scheduler")
            )
            self._check_fitting(groups, schedule, folder / MANIFEST, folder / MANIFEST)
        else:
            saved = hf_folders.saved_optimizer(folder)
            shards = None if saved is not None else read_shards(folder)
            if isinstance(self.optimizer, LayerWiseDummyOptimizer):
                refuse_part_of_optimizer(folder, ["the moments of each parameter"])
            given = saved["param_groups"] if saved else shards.groups if shards else None
            if given is None:
                _LOG.warning("%s holds no optimizer: it starts over", folder)
                return
            schedule = hf_folders.read_schedule(folder)
            groups, schedule = self._for_groups_here(given, schedule)
            self._check_fitting(groups, schedule, folder / OPTIMIZER_NAME, folder / SCHEDULER_NAME)
            self._restore_their_optimizer(folder, saved, shards)
        saved_values = [hyper_parameters(values) for values in groups]
        takes_new = getattr(self.args, "resume_hyper_parameters", "checkpoint") == "arguments"
        self._report_differing(folder, differing(saved_values, asked), takes_new)
        if takes_new:
            groups = [with_asked(*each) for each in zip(saved_values, asked, strict=False)]
        self._restore_groups(groups)
        if self.lr_scheduler is not None and schedule is not None:
            if takes_new:
                schedule = schedule_with_asked(schedule, self.lr_scheduler.state_dict(), groups)
            self.lr_scheduler.load_state_dict(dict(schedule))

    def _report_differing(self, folder: Path, found: list[str], takes_new: bool) -> None:
        """Name the hyper-parameters for which others are asked for than the checkpoint holds."""
        if not found:
            return
        _LOG.warning(
            "resuming from %s: %s. %s",
            folder,
            "; ".join(found),
            "The values asked for apply (resume_hyper_parameters='arguments')"
            if takes_new
            else "The checkpoint's values stay, as with HF's Trainer; set "
            "resume_hyper_parameters='arguments' to take the new ones",
        )

    def _for_groups_here(self, groups: Any, schedule: Any) -> tuple[Any, Any]:
        """Convert both states to the number of groups of this run's optimizer."""
        prepared = self.driver_session.prepared
        if prepared is None:
            return groups, schedule
        count = len(self._optimizer_there_is().param_groups)
        order = prepared.order
        return aligned(groups, order, count), aligned_schedule(schedule, order, count)

    def _check_fitting(self, groups: Any, schedule: Any, first: Path, second: Path) -> None:
        """Raises `CheckpointDamaged`, naming the first file for malformed groups of the optimizer,
        the second for a malformed schedule."""
        check_groups(groups, self._optimizer_there_is().param_groups, str(first))
        if self.lr_scheduler is not None and schedule is not None:
            check_schedule(schedule, self.lr_scheduler, str(second))

    def _restore_their_optimizer(
        self, folder: Path, saved: dict[str, Any] | None, shards: Shards | None
    ) -> None:
        """Restore the optimizer from a file of the whole state, or from a sharded checkpoint."""
        prepared, optimizer = self.driver_session.prepared, self._optimizer_there_is()
        own_loop = prepared is None or prepared.optimizer is not optimizer
        if saved is not None and own_loop:
            optimizer.load_state_dict(saved)
            return
        if own_loop:
            raise CheckpointMismatch(
                f"{folder}: its optimizer lies in parts, which a loop of your own cannot take "
                "over: resume it once with the Trainer's own, and save"
            )
        assert prepared is not None
        weights, scaler = self._weights_now(), hf_folders.read_scaler(folder)
        if shards is None:
            assert saved is not None
            dtypes = {name: tensor.dtype for name, tensor in weights.items()}
            tensors: Mapping[str, Tensor] = hf_folders.optimizer_tensors(
                saved, prepared.order, dtypes
            )
        else:
            check_names(shards, prepared.order, folder)
            tensors, scaler = shards.optimizer, {**scaler, **shards.scaler}
            # in float32, while a model's files may be rounded
            weights |= {name: shards.weights[name] for name in shards.weights if name in weights}
        prepared.engine.restore(OverlayReader(None, weights, tensors, scaler))

    def _restore_groups(self, saved: list[Mapping[str, Any]]) -> None:
        """Restore the hyper-parameters of the optimizer, including the learning rate."""
        prepared, own = self.driver_session.prepared, self._optimizer_there_is().param_groups
        for groups in (prepared.engine.param_groups, own) if prepared else (own,):
            for group, values in zip(groups, saved, strict=False):
                for name, value in hyper_parameters(values).items():
                    given = group.get(name)
                    if isinstance(given, Tensor):
                        given.fill_(value)
                    else:
                        group[name] = tuple(value) if isinstance(given, tuple) else value

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Restore the loss scaler of a folder that HF Trainer wrote. If the folder has an
        optimizer, the scaler was restored with it, and restoring it here would reset the optimizer.
        """
        folder = None if checkpoint is None else Path(checkpoint)
        if folder is None or hf_folders.saved_optimizer(folder) is not None:
            return
        if scaler := hf_folders.read_scaler(folder):
            self.driver_session.engine.restore(
                OverlayReader(None, self._weights_now(), state=scaler)
            )

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore this rank's random state, if the checkpoint holds it."""
        if checkpoint is None:
            return
        folder, session = Path(checkpoint), self.driver_session.session
        if (folder / MANIFEST).is_file():
            if load_rng(CheckpointReader(folder), session, self.driver_session.driver.name):
                _LOG.info(
                    "%s holds no random state for this rank, as after a run on another number of "
                    "ranks: random numbers will not continue where they were",
                    folder,
                )
        else:
            hf_folders.load_random_state(folder, session.world.rank, session.world.size)
