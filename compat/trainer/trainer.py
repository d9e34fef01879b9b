"""The Trainer: its parts and its construction."""

from __future__ import annotations

import inspect
import logging
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..accelerate.accelerator import Accelerator
from ..accelerate.library_state import start_library_state
from ..arguments import TrainingArguments
from ..arguments.driver_session import DriverSession, take_back
from ..callbacks.base import CallbackHandler
from ..callbacks.jit_checkpoint import jit_checkpoint_callbacks
from ..callbacks.state import ExportableState, TrainerControl, TrainerState
from ..common.inspection import can_return_loss, find_labels, model_accepts_loss_kwargs, unwrap_peft
from ..common.loss import LabelSmoother, loss_shifts_labels
from ..common.overrides import is_overridden, refuse_replaced, refuse_uncalled
from ..common.placement import move_model
from ..common.seeding import enable_full_determinism, set_seed
from ..data.collators import collator_for
from ..data.lengths import has_length
from ..enums import SaveStrategy
from ..errors import ArgumentError
from ..integrations.trackers import all_callbacks
from ..logs import set_verbosity
from ..profile import profile_of
from .memory import memory_tracker
from .partitioning import partition_plan
from .trainable import refuse_untrainable
from .training import TrainingMixin

__all__ = ["Trainer"]

_LOG = logging.getLogger(__name__)


class Trainer(TrainingMixin):
    """Hugging Face's Trainer on drivetrain's kernel and drivers; same names, same numbers.

    `args.backend`, or the arguments from which it is inferred, selects the driver. For
    contradicting arguments it raises the errors that HF raises: ValueError, RuntimeError or
    TypeError.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: Any = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., nn.Module] | None = None,
        compute_loss_func: Callable[..., Any] | None = None,
        compute_metrics: Callable[..., dict[str, Any]] | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[..., Any] | None = None,
        tokenizer: Any = None,
    ) -> None:
        if args is None:
            args = TrainingArguments(output_dir="tmp_trainer")
        self.args = args
        self._seed()
        self.model: Any = model
        self.deepspeed: Any = None
        self.create_accelerator_and_postprocess()
        self._memory_tracker = memory_tracker(args.skip_memory_metrics)
        self._memory_tracker.start()
        set_verbosity(args.get_process_log_level())
        self._take_model(model, model_init)
        self._look_at_model()
        self.processing_class = _one_processing_class(processing_class, tokenizer)
        self.data_collator: Any = data_collator or collator_for(self.processing_class)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.neftune_noise_alpha = args.neftune_noise_alpha
        self.compute_loss_func, self.compute_metrics = compute_loss_func, compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.optimizer, self.lr_scheduler = optimizers
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        self._validate_args()
        self._start_callbacks(callbacks)
        self._start_output()
        self._start_state()
        self.control = self.callback_handler.on_init_end(args, self.state, self.control)
        config = getattr(self.model, "config", None)
        if config is not None and profile_of(args).switches_cache_off:
            config.use_cache = getattr(args, "use_cache", False)
        self._memory_tracker.stop_and_update_metrics()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        refuse_uncalled(cls)
        cls._splits_sequences = is_overridden(cls, "_prepare_context_parallel_inputs")

    # --- the parts of construction ----------------------------------------------------------

    def _seed(self) -> None:
        (enable_full_determinism if self.args.full_determinism else set_seed)(self.args.seed)

    def create_accelerator_and_postprocess(self) -> None:
        """Create the session for the arguments, and the `accelerator` for other libraries."""
        earlier = getattr(self.args, "_driver_session", None)
        if earlier is not None and earlier.of_arguments:
            self._session_of_arguments = earlier
        self.driver_session = self.args._driver_session = DriverSession(
            self.args, self.model, clips=not self._measures_gradients()
        )
        self.accelerator = Accelerator(self)
        start_library_state(self.args)
        state = self.accelerator.state
        self.is_deepspeed_enabled = getattr(state, "deepspeed_plugin", None) is not None
        self.is_fsdp_enabled = getattr(state, "fsdp_plugin", None) is not None
        self.is_fsdp_xla_enabled = self.is_fsdp_xla_v1_enabled = self.is_fsdp_xla_v2_enabled = False
        self.gather_function = self.accelerator.gather_for_metrics

    def _take_model(self, model: Any, model_init: Callable[..., nn.Module] | None) -> None:
        self.model_init = model_init
        if model is None and model_init is None:
            raise RuntimeError("`Trainer` requires either a `model` or `model_init` argument")
        if model is not None and model_init is not None:
            if not profile_of(self.args).model_beside_model_init:
                raise ValueError(
                    "`Trainer` requires either a `model` or `model_init` argument, but not both."
                )
            _LOG.warning("model and model_init are given: train() starts from model_init's")
        if model is None:
            model = self.call_model_init()
        take_back(model, self.driver_session)
        refuse_untrainable(model, self.driver_session)
        refuse_replaced(type(self), self.driver_session)
        devices = {d for d in getattr(model, "hf_device_map", {}).values() if d not in _NO_DEVICE}
        alone = devices and {torch.device(device) for device in devices} == {self.args.device}
        self.is_model_parallel = bool(devices) and not alone
        if self.is_model_parallel:
            self.args._n_gpu = 1
        self.place_model_on_device = self._places_model()
        self.model = self.model_wrapped = model
        if self.place_model_on_device:
            self._move_model_to_device(model, self.args.device)

    def _places_model(self) -> bool:
        asked: bool | None = getattr(self.args, "place_model_on_device", None)
        if asked is not None:
            return asked
        half = self.args.fp16_full_eval or self.args.bf16_full_eval
        return not (self.is_model_parallel or half or self.driver_session.is_sharded())

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """Move a model. A model with a device map is not moved, nor one that bitsandbytes has
        quantized, which cannot be moved.
        """
        if getattr(model, "hf_device_map", None) is not None:
            _LOG.warning(
                "the model stays where its device_map has put it (%s), and is not moved to %s",
                ", ".join(map(str, set(model.hf_device_map.values()))) or "nowhere",
                device,
            )
            return
        method = getattr(model, "quantization_method", None)
        if getattr(method, "value", method) != "bitsandbytes":
            move_model(model, device)

    def _look_at_model(self) -> None:
        inner = unwrap_peft(self.model)
        self.model_accepts_loss_kwargs = model_accepts_loss_kwargs(self.model)
        names = self.args.label_names
        self.label_names = find_labels(type(inner)) if names is None else names
        self.can_return_loss = can_return_loss(type(inner))
        counted = profile_of(self.args).counts_predicted_labels
        self._loss_shifts_labels = counted and loss_shifts_labels(self.model)
        self.label_smoother = self._smoother()
        self._signature_columns: list[str] | None = None

    def _smoother(self) -> LabelSmoother | None:
        epsilon = self.args.label_smoothing_factor
        kind = getattr(getattr(self.model, "config", None), "problem_type", None)
        if epsilon and kind == "multi_label_classification":
            warnings.warn(
                "Label smoothing is not compatible with multi-label classification, in which "
                f"several labels may hold together: label_smoothing_factor={epsilon} has no effect",
                stacklevel=3,
            )
            return None
        return LabelSmoother(epsilon) if epsilon else None

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Make a model by `model_init`, which takes no argument, or the trial of a search."""
        assert self.model_init is not None
        count = len(inspect.signature(self.model_init).parameters)
        if count > 1:
            raise RuntimeError(
                f"model_init should have 0 or 1 argument, and {self.model_init!r} has {count}"
            )
        model = self.model_init(trial) if count else self.model_init()
        if model is None:
            raise RuntimeError("model_init should not return None")
        return model

    def _validate_args(self) -> None:
        args = self.args
        if args.batch_eval_metrics and not _takes_result(self.compute_metrics):
            raise ValueError(
                "batch_eval_metrics=True calls compute_metrics once a batch, and with "
                "compute_result=True after the last: give it that parameter"
            )
        if args.eval_strategy not in (None, "no") and self.eval_dataset is None:
            raise ValueError(
                f"eval_strategy is {args.eval_strategy!r} and there is no eval_dataset: give one, "
                "or set eval_strategy='no'"
            )
        if args.save_strategy == SaveStrategy.BEST:
            _check_best(args)
        if self.optimizer_cls_and_kwargs is not None and self.optimizer is not None:
            raise RuntimeError("give `optimizers` or `optimizer_cls_and_kwargs`, not both")
        if self.model_init is not None and (self.optimizer or self.lr_scheduler):
            raise RuntimeError(
                "`model_init` makes a new model for each train(), which `optimizers=` would not "
                "train: override `create_optimizer_and_scheduler` instead"
            )
        if (self.optimizer or self.lr_scheduler) and self.driver_session.is_sharded():
            raise RuntimeError(
                f"`optimizers=` was given, and {self.driver_session.driver.name} replaces the "
                "parameters that an optimizer holds. Give `optimizer_cls_and_kwargs=`, or override "
                "`create_optimizer`, which is called when they are there"
            )
        if args.n_gpu > 1:
            raise ArgumentError(
                f"_n_gpu is {args.n_gpu}, and one process trains on one device: leave it alone, "
                f"and start a process for each by torchrun --nproc-per-node={args.n_gpu}"
            )
        if not callable(self.data_collator):
            raise TypeError(f"data_collator is {self.data_collator!r}; it must be callable")
        if getattr(args, "checkpoint_format", "") == "hf" and (
            self.is_deepspeed_enabled or self.is_fsdp_enabled
        ):
            _LOG.warning(
                "checkpoint_format='hf' writes the whole model and optimizer: HF's Trainer resumes "
                "them on one process and under DDP, and not under FSDP or DeepSpeed, which want "
                "files of their own. drivetrain resumes them on any driver"
            )
        self._refuse_unloadable()
        partition_plan(self)  # raises before anything is started
        data = self.train_dataset
        if args.max_steps <= 0 and data is not None and not has_length(data):
            raise ValueError(
                "the train_dataset has no length, so max_steps has to set the length of training"
            )

    def _start_callbacks(self, callbacks: list[Any] | None) -> None:
        self.callback_handler = CallbackHandler(
            all_callbacks(self.args, [*jit_checkpoint_callbacks(self), *(callbacks or ())]),
            self.model,
            self.processing_class,
            self.optimizer,
            self.lr_scheduler,
        )

    def _start_output(self) -> None:
        self.hub_model_id: str | None = None
        if self.args.push_to_hub:
            self.init_hf_repo()
        if self.args.should_save:
            os.makedirs(self.args.output_dir, exist_ok=True)

    def _start_state(self) -> None:
        self.control = TrainerControl()
        stateful = [*self.callback_handler.callbacks, self.control]
        self.state = TrainerState(
            is_local_process_zero=self.is_local_process_zero(),
            is_world_process_zero=self.is_world_process_zero(),
            stateful_callbacks=[each for each in stateful if isinstance(each, ExportableState)],
        )
        self.is_in_train = False
        self.hp_name = self.hp_search_backend = self.hp_space = None
        self.compute_objective = self.objective = self._trial = None
        self.current_flos = 0.0
        self._train_batch_size = self.args.train_batch_size
        self._created_lr_scheduler = False
        self._globalstep_last_logged = self._initial_global_step = 0
        self._initial_num_input_tokens_seen = 0
        self._total_loss_scalar = 0.0

    # --- callbacks, ranks, sizes --------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """The old name of `processing_class`; can also be set."""
        return self.processing_class

    @tokenizer.setter
    def tokenizer(self, value: Any) -> None:
        self.processing_class = value

    def add_callback(self, callback: Any) -> None:
        """Add a callback, or make one of a class."""
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback, by itself or by its class, and return it; None if there is none."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback, by itself or by its class."""
        self.callback_handler.remove_callback(callback)

    def is_local_process_zero(self) -> bool:
        """True if this is the first process of its machine."""
        return bool(self.args.local_process_index == 0)

    def is_world_process_zero(self) -> bool:
        """True if this is the first process of all."""
        return bool(self.args.process_index == 0)

    def get_tp_size(self) -> int:
        """Return the number of ranks that share one layer."""
        return self.driver_session.ranks_along("tensor")

    def get_cp_size(self) -> int:
        """Return the number of ranks that share one sequence, unless `sp_size` requested them."""
        return self.driver_session.ranks_along("context") // self.get_sp_size()

    def get_sp_size(self) -> int:
        """Return the number of ranks that share one sequence, if `sp_size` requested them; else
        1."""
        return int(getattr(self.accelerator.parallelism_config, "sp_size", None) or 1)

    def end(self) -> None:
        """Leave the process group; the Trainer cannot be used afterwards. A model that the driver
        has partitioned becomes whole again, in host memory, and another Trainer can train it,
        unless training ended by an error.
        """
        self.driver_session.close(gives_back=self._training is None)
        if self._session_of_arguments is not None:
            self._session_of_arguments.close()


_NO_DEVICE = ("cpu", "disk")


def _one_processing_class(processing_class: Any, tokenizer: Any) -> Any:
    if tokenizer is None:
        return processing_class
    if processing_class is not None:
        raise ValueError("give processing_class or its old name tokenizer, not both")
    _LOG.warning("Trainer(tokenizer=...) is the old name of processing_class")
    return tokenizer


def _check_best(args: Any) -> None:
    """Raises ValueError if no metric decides which checkpoint is best; warns if nothing evaluates
    it."""
    if args.metric_for_best_model is None:
        raise ValueError(
            "`args.metric_for_best_model` must be provided where save_strategy is 'best': it is "
            "None, so nothing says what is best, and nothing is saved. Name a metric, such as "
            "'loss'"
        )
    if args.eval_strategy in (None, "no"):
        _LOG.warning(
            "save_strategy is 'best' and eval_strategy is 'no': only a callback that sets "
            "control.should_evaluate brings a checkpoint about"
        )


def _takes_result(compute_metrics: Callable[..., Any] | None) -> bool:
    return (
        compute_metrics is None or "compute_result" in inspect.signature(compute_metrics).parameters
    )
