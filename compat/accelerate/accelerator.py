"""`trainer.accelerator`: the members of accelerate's `Accelerator` that trainers written for HF
use.

It has no process group or wrapper of its own: the Trainer's `driver_session` does the work.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ...checkpoint import CheckpointReader
from ..arguments.accelerator_config import AcceleratorConfig, resolve_accumulation
from ..arguments.backend import chosen, notes, ranks_of_a_reader
from ..arguments.processes import Processes
from ..checkpoints.extra_files import tensors_alone
from ..checkpoints.model_files import write_weights
from ..common.placement import move
from ..data.rank_batches import FixedShare
from ..data.sharding import RankLoader, shard, skip_first_batches
from ..errors import ArgumentError
from ..names import PREFIX_CHECKPOINT_DIR, get_last_checkpoint
from .collectives import Collectives, ViewedTrainer

__all__ = ["Accelerator"]

_LOG = logging.getLogger(__name__)


class Accelerator(Collectives):
    """A view of the Trainer's `driver_session`. All processes must call the methods that
    communicate."""

    def __init__(self, trainer: ViewedTrainer) -> None:
        super().__init__(trainer)
        self.dataloader_config = AcceleratorConfig.of(trainer.args.accelerator_config)
        self.state = Processes(trainer.args)
        self.gradient_accumulation_steps = 1  # the Trainer accumulates
        self._warned_of_trackers = False
        resolve_accumulation(trainer.args)
        for note in notes(trainer.args, chosen(trainer.args).driver):
            _LOG.warning("%s", note)

    scaler = torch_device_mesh = None
    """None: loss scaler and device mesh are the driver's."""
    trackers: tuple[Any, ...] = ()
    """Empty: the trackers in `report_to` are callbacks of the Trainer."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"trainer.accelerator has no {name!r}: it has no model, optimizer, process group or "
            "loop of its own, and what accelerate's does with one the driver and the Trainer do. "
            "See docs/from-hf-trainer.md"
        )

    # --- how the loop and loaders are set up

    @property
    def sync_gradients(self) -> bool:
        """True if an update follows this microbatch."""
        return self.gradient_state.sync_gradients

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """True if the last update was skipped, for a gradient that was not finite."""
        outcome = self._trainer._last_outcome
        return outcome is not None and not outcome.applied()

    @property
    def even_batches(self) -> bool:
        """True if the last round of batches is filled up; can be set before a loader is made."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.dataloader_config.even_batches = value

    @property
    def split_batches(self) -> bool:
        """True if batch sizes are those of all processes together."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """See `AcceleratorConfig.dispatch_batches`."""
        return self.dataloader_config.dispatch_batches

    @property
    def use_seedable_sampler(self) -> bool:
        """True if the order of samples depends on the seed alone."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """True if batches are copied to the device asynchronously."""
        return self.dataloader_config.non_blocking

    # --- making things ready

    def prepare(self, *objects: Any, device_placement: Any = None) -> Any:
        """Return loaders of this process's share, and models on its device; return everything else
        unchanged. The Trainer itself wraps the model that it trains, with its optimizer.
        """
        prepared = tuple(self._prepare_one(item) for item in objects)
        return prepared[0] if len(prepared) == 1 else prepared

    def _prepare_one(self, item: Any) -> Any:
        if isinstance(item, DataLoader):
            return self.prepare_data_loader(item)
        return self.prepare_model(item) if isinstance(item, nn.Module) else item

    def prepare_data_loader(self, data_loader: DataLoader[Any], **ignored: Any) -> RankLoader:
        """Return a loader over this process's share of the batches of `data_loader`."""
        config, args = self.dataloader_config, self.args
        shared = ranks_of_a_reader(args)
        seed = args.seed if args.data_seed is None else args.data_seed
        loader = shard(
            data_loader,
            FixedShare(self.process_index // shared, self.num_processes // shared),
            seed=seed if config.use_seedable_sampler else None,
            split_batches=config.split_batches,
            even_batches=config.even_batches,
            dispatch_batches=config.dispatch_batches,
            active=self.gradient_state.active,
        )
        if ignored.get("device_placement", True):
            loader.device = self.device
        return loader

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Move a model, such as a reference or reward model, to this process's device.

        Raises `ArgumentError` for a second model to train on several processes: nothing would
        average its gradients.
        """
        own = self._trainer.model
        trained = any(parameter.requires_grad for parameter in model.parameters())
        if self.num_processes > 1 and trained and not evaluation_mode and own not in (None, model):
            raise ArgumentError(
                f"accelerator.prepare was given a {type(model).__name__} with trainable parameters "
                "that is not the Trainer's model, and nothing would average its gradients over "
                "processes; freeze it (requires_grad_(False)), make it a part of the Trainer's "
                "model, or pass evaluation_mode=True"
            )
        if evaluation_mode:
            model.eval()
        if device_placement is False or getattr(model, "hf_device_map", None):
            return model
        return model.to(self.device)

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Return the optimizer unchanged."""
        return optimizer

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Return the scheduler unchanged: the loop steps it once per update."""
        return scheduler

    def unwrap_model(
        self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> Any:
        """Return the user's own module, without a driver's wrapper."""
        prepared = self._trainer.driver_session.prepared
        if prepared is not None and model is prepared.engine.module:
            return prepared.model
        compiled = hasattr(model, "_orig_mod")
        inner = model._orig_mod if compiled else model
        while type(inner).__name__ in _WRAPPERS:
            inner = inner.module
        return model if compiled and keep_torch_compile else inner

    def skip_first_batches(self, dataloader: DataLoader[Any], num_batches: int = 0) -> RankLoader:
        """Return the loader without its first batches, whose samples are not read from a map-style
        data set."""
        return skip_first_batches(dataloader, num_batches)

    # --- training

    def backward(self, loss: Tensor, **ignored: Any) -> None:
        """Add the gradient of a microbatch's loss; nothing is divided here."""
        self._trainer._backward(loss)

    @contextmanager
    def autocast(self, autocast_handler: Any = None) -> Iterator[None]:
        """Run a forward in the precision of the arguments."""
        with self._trainer.driver_session.autocast():
            yield

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[Any]:
        """Do nothing: the Trainer's loop accumulates."""
        return nullcontext()

    def no_sync(self, model: Any) -> AbstractContextManager[Any]:
        """Run a backward without averaging its gradients yet, if the wrapper supports this."""
        context: AbstractContextManager[Any] = getattr(model, "no_sync", nullcontext)()
        return context

    @contextmanager
    def maybe_context_parallel(self, **ignored: Any) -> Iterator[None]:
        """Do nothing: the driver `mesh` partitions sequences itself."""
        yield

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Any:
        """Clip gradients that a subclass handles itself; the Trainer's own updates clip theirs.

        Return the norm before clipping, 0-d. Under DeepSpeed, which clips by itself, return the
        norm of the last update.
        """
        prepared = self._trainer.driver_session.prepared
        own = getattr(prepared and prepared.engine.module, "get_global_grad_norm", None)
        if own is not None:
            return own()
        norm = nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Limit every element of the gradients that a subclass handles itself."""
        nn.utils.clip_grad_value_(parameters, clip_value)

    # --- the rest

    def print(self, *values: Any, **options: Any) -> None:
        """Print on the first process of each machine."""
        if self.is_local_main_process:
            print(*values, **options)

    def free_memory(self, *objects: Any) -> list[None]:
        """Empty the caches of host and device. Return None for each object, to replace the caller's
        references."""
        gc.collect()
        if self.device.type in ("cuda", "xpu"):
            torch.accelerator.empty_cache()
        return [None for _ in objects]

    clear = free_memory

    def end_training(self) -> None:
        """Wait for the other processes; `trainer.end()` leaves the process group."""
        self.wait_for_everyone()

    # --- checkpoints and trackers

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True) -> str:
        """Write a checkpoint of the active run, `checkpoint-<step>`, into a folder (by default the
        run's own), and return its path; `train(resume_from_checkpoint=...)` accepts it, too.
        """
        trainer = self._in_training("save_state")
        step = trainer.state.global_step
        folder = Path(output_dir or trainer.args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{step}")
        trainer._write_kernel_checkpoint(folder, step)
        return str(folder)

    def load_state(
        self, input_dir: str | None = None, load_kwargs: Any = None, **model_options: Any
    ) -> None:
        """Load the weights, the optimizer, the schedule and the random state of a checkpoint, or of
        the newest in a folder, into the active run. Its progress does not change. Raises
        `ArgumentError` for options: there is one way to load.
        """
        if load_kwargs or model_options:
            raise ArgumentError(
                f"accelerator.load_state has no options, and was given {load_kwargs or ''}"
                f"{model_options or ''}: remove them"
            )
        trainer = self._in_training("load_state")
        input_dir = self.args.output_dir if input_dir is None else input_dir
        folder = get_last_checkpoint(input_dir) or str(input_dir)
        trainer.driver_session.engine.restore(CheckpointReader(folder))
        trainer._load_optimizer_and_scheduler(folder)
        trainer._load_rng_state(folder)

    def _in_training(self, method: str) -> ViewedTrainer:
        if self._trainer._training is None:
            raise ArgumentError(
                f"accelerator.{method} needs an active run, and train() is not running: call it in "
                "a callback; or use trainer.save_model, and train(resume_from_checkpoint=...)"
            )
        return self._trainer

    def save_model(self, model: nn.Module, save_directory: str | Path, **ignored: Any) -> None:
        """Write the whole `model.safetensors` on the first process. All processes call it."""
        weights = self.get_state_dict(model)
        if self.is_main_process:
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            write_weights(Path(save_directory), weights)

    def init_trackers(self, project_name: str, config: Any = None, init_kwargs: Any = None) -> None:
        """Do nothing, as transformers' Trainer does, and warn: see `log`."""
        self.log({})

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: Any = None) -> None:
        """Do nothing, as transformers' Trainer does, and warn."""
        if not self._warned_of_trackers:
            self._warned_of_trackers = True
            _LOG.warning(
                "trainer.accelerator has no trackers, and what is logged with it is lost: name "
                "trackers in report_to, and call trainer.log"
            )

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return accelerate's tracker that does nothing, as transformers' Trainer does."""
        from accelerate.tracking import GeneralTracker

        self.log({})
        return GeneralTracker(_blank=True)

    def save(self, obj: Any, f: Any, safe_serialization: bool = True) -> None:
        """Write a dict of tensors as safetensors, on the first process. Raises `ArgumentError`
        when asked to pickle.
        """
        if not safe_serialization:
            raise ArgumentError("accelerator.save(safe_serialization=False) would pickle")
        if self.is_main_process:
            from safetensors.torch import save_file

            save_file(move(obj, torch.device("cpu")), f)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> dict[str, Tensor]:
        """Return all weights of the Trainer's model, whole, on the host. All processes call it."""
        prepared = self._trainer.driver_session.prepared
        inner = self.unwrap_model(model)
        if prepared is None or prepared.model is not inner:
            return dict(inner.state_dict())
        with prepared.engine.full_params() as whole:
            tensors, others = tensors_alone(packed := whole.state_dict())
            copies = {name: value.detach().cpu().clone() for name, value in tensors.items()}
            return {**copies, **{name: packed[name] for name in others}}


_WRAPPERS = ("DistributedDataParallel", "DataParallel", "DeepSpeedEngine")
