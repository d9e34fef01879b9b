"""Resuming: from checkpoints of the kernel, and from folders that HF Trainer wrote."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ...checkpoint import CheckpointReader, load_rng, own_random_state, read_manifest
from ...checkpoint.manifest import MANIFEST
from ...data.indexed import length_of
from ...kernel.batches import Position
from ...kernel.errors import printable
from ...kernel.loop import TrainLoop
from ...trainer.resume import differences
from ..arguments.backend import settings
from ..callbacks.state import TrainerControl, TrainerState
from ..names import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from ..optim.layerwise import LayerWiseDummyOptimizer
from ..optim.parameters import hyper_parameters
from ..optim.schedules import restore_schedule
from ..profile import profile_of
from ..trainer.inspection import is_peft_model
from ..trainer.overrides import is_overridden
from ..trainer.parts import TrainerParts
from . import hf_folders
from .edited import edited_weights
from .fitting import check_groups, check_schedule, refuse_part_of_optimizer
from .json_state import from_plain
from .model_files import (
    adapters_in,
    compare_versions,
    first_adapter,
    frozen_names,
    has_weights,
    load_adapters,
    load_weights,
    loads_itself,
    read_weights,
    reshape_buffers,
    stored_weights,
)
from .overlay_reader import OverlayReader
from .rotation import altered, newest_unaltered, problem_with

__all__ = ["ResumingMixin"]

_LOG = logging.getLogger(__name__)


class ResumingMixin(TrainerParts):
    """Loading of checkpoints, to resume from and for the best model."""

    # --- which checkpoint ---------------------------------------------------------------------

    def _checkpoint_to_resume(self, resume_from_checkpoint: str | bool | None) -> str | None:
        """The folder to resume from: True takes the newest one in `output_dir` that is whole.

        Raises ValueError when there is none, or the folder given is none.
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
        """Go on with the batch size that was found before."""
        wanted = self.args.auto_find_batch_size or profile_of(self.args).resumes_batch_size
        if wanted and (folder / TRAINER_STATE_NAME).is_file():
            stored = TrainerState.load_from_json(folder / TRAINER_STATE_NAME).train_batch_size
            self._train_batch_size = stored or self._train_batch_size

    # --- weights ------------------------------------------------------------------------------

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        """Load a checkpoint's weights into the model, or into another one. Raises ValueError when
        the folder is no checkpoint.

        In `train`, those of a kernel's checkpoint are left for the driver, which reads from it what
        each rank needs; but for a model that changes with what it loads, and a loop that is a
        subclass's own.
        """
        folder = Path(resume_from_checkpoint)
        if problem := problem_with(folder):
            raise ValueError(f"Can't find a valid checkpoint at {folder}: {problem}")
        early = self._has_own("_inner_training_loop") or loads_itself(self.model)
        if (folder / MANIFEST).is_file() and model is None and self.is_in_train and not early:
            return
        _LOG.info("loading the model from %s", folder)
        compare_versions(folder)
        model = self.model if model is None else model
        if self.driver_session.has_cut(model):
            self.driver_session.engine.restore(self._weights_reader(folder))
        elif is_peft_model(model) and adapters_in(folder):
            load_adapters(model, folder)
        else:
            self._issue_warnings_after_load(load_weights(model, read_weights(folder)))

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Name the keys that a checkpoint lacks, and those that the model has no place for."""
        ignored = getattr(self.model, "_keys_to_ignore_on_save", None)
        if load_result.missing_keys:
            if ignored and set(load_result.missing_keys) == set(ignored):
                self.model.tie_weights()
            else:
                _LOG.warning(
                    "There were missing keys in the checkpoint model loaded: %s.",
                    load_result.missing_keys,
                )
        if load_result.unexpected_keys:
            _LOG.warning(
                "There were unexpected keys in the checkpoint model loaded: %s.",
                load_result.unexpected_keys,
            )

    def _load_best_model(self) -> None:
        """Give the model the weights of the best checkpoint; the optimizer stays as it is."""
        assert self.state.best_model_checkpoint is not None
        folder = Path(self.state.best_model_checkpoint)
        _LOG.info("loading the best model from %s (%s)", folder, self.state.best_metric)
        if problem := problem_with(folder):
            _LOG.warning(
                "the best model could not be loaded, the last one stays: %s: %s. On several "
                "machines without a common file system, set save_on_each_node=True",
                folder,
                problem,
            )
        elif self.driver_session.has_cut(self.model):
            self.driver_session.engine.restore(self._weights_reader(folder))
        elif is_peft_model(self.model) and adapters_in(folder):
            self._load_best_adapter(folder)
        elif (folder / MANIFEST).is_file() and not has_weights(folder):  # deleted, to save room
            self.driver_session.engine.restore(self._weights_reader(folder))
        else:
            if (folder / MANIFEST).is_file():
                reshape_buffers(self.model, CheckpointReader(folder))
            self._issue_warnings_after_load(load_weights(self.model, read_weights(folder)))

    def _load_best_adapter(self, folder: Path) -> None:
        name = first_adapter(self.model)
        own = folder / name
        try:
            self.model.load_adapter(str(own if own in adapters_in(folder) else folder), name)
        except RuntimeError as error:
            config = self.model.peft_config[name]
            if not config.is_prompt_learning:
                raise
            raise RuntimeError(
                f"load_best_model_at_end cannot load {config.peft_type.value} adapters, which are "
                "prompts, into a model that has them: set it to False, and load the best one after "
                f"training by PeftModel.from_pretrained(base_model, {str(folder)!r})"
            ) from error

    def _weights_reader(self, folder: Path) -> OverlayReader:
        """A checkpoint's weights and nothing else; those that it lacks stay as they are."""
        if (folder / MANIFEST).is_file():
            stored = CheckpointReader(folder)
            return OverlayReader(stored, self._weights_beside(stored), kinds=("weights",))
        if adapters_in(folder):
            raise ValueError(
                f"{folder} holds adapters alone, and this driver holds parts of the model on each "
                "rank: leave save_only_model=False to load the best model at the end"
            )
        return OverlayReader(None, weights={**self._weights_now(), **read_weights(folder)})

    def _weights_beside(self, stored: CheckpointReader) -> dict[str, Tensor]:
        """The weights to take in place of a checkpoint's own: those that it has not, as they are
        in the model, and those of edited files.
        """
        if self._has_own("_load_from_checkpoint"):
            return self._weights_now()
        absent = frozen_names(self.model).difference(stored.names("weights"))
        edited = edited_weights(stored, self.driver_session.session)
        return {**self._weights_now(absent), **edited}

    def _weights_now(self, names: frozenset[str] | None = None) -> dict[str, Tensor]:
        """Weights as the model has them: whole, by FQN; copies where ranks hold parts of them."""
        if names is not None and not names:
            return {}
        sharded, engine = self.driver_session.is_sharded(), self.driver_session.engine
        chosen = None if names is None else sorted(names)
        with engine.full_params(chosen) if sharded else nullcontext(self.model) as module:
            return {
                name: tensor.detach().cpu().clone() if sharded else tensor.detach()
                for name, tensor in stored_weights(module).items()
                if names is None or name in names
            }

    # --- everything else ----------------------------------------------------------------------

    def _resume_training(self, training: TrainLoop, checkpoint: str) -> None:
        """Take over a checkpoint: progress, state, optimizer, schedule, random state.

        The model is wrapped, and has the weights of a folder that HF Trainer wrote; of a kernel's
        checkpoint they are read here.
        """
        folder = Path(checkpoint)
        if (folder / MANIFEST).is_file():
            self._resume_kernel(training, CheckpointReader(folder))
        else:
            training.progress = hf_folders.progress_at(self.state.global_step, training.data)
            training.start_window()
        self._load_optimizer_and_scheduler(checkpoint)
        self._load_scaler(checkpoint)
        self._load_rng_state(checkpoint)

    def _resume_kernel(self, training: TrainLoop, stored: CheckpointReader) -> None:
        """But for what a subclass has a method of its own for, which is called after this."""
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
            training.restore(reader, state, where)
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
        """Warn, once, of what the checkpoint's run did otherwise. The arguments count."""
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
        """Warn where a begun epoch goes on in the order of other data, as with HF's Trainer."""
        then, now = state.get("data_length"), length_of(self.train_dataset)
        skips = position.samples and not self.args.ignore_data_skip
        if None in (then, now) or then == now or not skips:
            return
        _LOG.warning(
            "train_dataset had %.20s samples, and has %s, in another order. As many batches of "
            "epoch %s are skipped as were trained on: some samples come twice in it, and some not "
            "at all. To begin that epoch anew set ignore_data_skip=True; a recipe of drivetrain "
            "finishes it in the order in which it was begun",
            then,
            now,
            position.epoch,
        )

    def _load_callback_state(self) -> None:
        """With `restore_callback_states_from_checkpoint`, put callbacks as they were in the place
        of those of the same class.
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
        """Take over the learning rate schedule, and of HF's folders the optimizer: both, or, where
        one of the files is missing, neither.
        """
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        if (folder / MANIFEST).is_file():
            state = from_plain(read_manifest(folder).state)
            refuse_part_of_optimizer(folder, state.get("optimizer_unsaved"))
            if self._training is None or is_overridden(type(self), "_load_optimizer_and_scheduler"):
                stored = CheckpointReader(folder)
                reader = OverlayReader(stored, self._weights_beside(stored))
                self.driver_session.engine.restore(reader)
            groups, schedule = state.get("optimizer_groups", []), state.get("scheduler")
            self._check_fitting(groups, schedule, folder / MANIFEST, folder / MANIFEST)
        else:
            saved = hf_folders.saved_optimizer(folder)
            if isinstance(self.optimizer, LayerWiseDummyOptimizer):
                refuse_part_of_optimizer(folder, ["the moments of each parameter"])
            if saved is None:
                _LOG.warning("%s holds no optimizer: it starts anew", folder)
                return
            groups, schedule = saved["param_groups"], hf_folders.read_schedule(folder)
            self._check_fitting(groups, schedule, folder / OPTIMIZER_NAME, folder / SCHEDULER_NAME)
            self._restore_their_optimizer(folder, saved)
        self._restore_groups(groups)
        if self.lr_scheduler is not None and schedule is not None:
            restore_schedule(self.lr_scheduler, schedule)

    def _check_fitting(self, groups: Any, schedule: Any, first: Path, second: Path) -> None:
        """Raises `CheckpointDamaged`, naming the first file for groups of the optimizer that are
        none, the second for a schedule."""
        check_groups(groups, self._optimizer_there_is().param_groups, str(first))
        if self.lr_scheduler is not None and schedule is not None:
            check_schedule(schedule, self.lr_scheduler, str(second))

    def _restore_their_optimizer(self, folder: Path, saved: dict[str, Any]) -> None:
        prepared, optimizer = self.driver_session.prepared, self._optimizer_there_is()
        if prepared is None or prepared.optimizer is not optimizer:  # of a loop that is its own
            optimizer.load_state_dict(saved)
            return
        tensors = hf_folders.optimizer_tensors(saved, prepared.order)
        scaler = hf_folders.read_scaler(folder)
        prepared.engine.restore(OverlayReader(None, self._weights_now(), tensors, scaler))

    def _restore_groups(self, saved: list[Mapping[str, Any]]) -> None:
        """The hyper-parameters of the optimizer, with the learning rate where it was."""
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
        """Take over the loss scaler of a folder that HF Trainer wrote; with an optimizer beside it
        that was done with that, which this would make a fresh one.
        """
        folder = None if checkpoint is None else Path(checkpoint)
        if folder is None or hf_folders.saved_optimizer(folder) is not None:
            return
        if scaler := hf_folders.read_scaler(folder):
            self.driver_session.engine.restore(
                OverlayReader(None, self._weights_now(), state=scaler)
            )

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Take over this rank's random state, where the checkpoint holds it."""
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
