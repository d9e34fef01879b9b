"""The attributes that all parts of a Trainer share.

Each part is a class that derives from the parts whose methods it calls. Methods of parts further up
are declared here, besides the shared attributes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..kernel.contract import Outcome
from ..kernel.errors import SaveFailed
from ..kernel.loop import TrainLoop
from ..kernel.recipe import Microstep
from ..trainer.run_lock import RunLock
from .accelerate.accelerator import Accelerator
from .arguments.driver_session import DriverSession
from .callbacks.base import CallbackHandler
from .callbacks.state import TrainerControl, TrainerState
from .common.loss import LabelSmoother
from .common.overrides import is_replaced

__all__ = ["TrainerParts"]


class TrainerParts:
    """Attributes of a Trainer, and methods of parts further up that a part calls."""

    # --- what it was made with
    args: Any
    """`TrainingArguments`, or those of another library that have the same fields."""
    model: Any
    """The model as the user knows it."""
    model_init: Callable[..., nn.Module] | None
    train_dataset: Any
    eval_dataset: Any
    data_collator: Callable[[list[Any]], Any]
    processing_class: Any
    compute_metrics: Callable[..., dict[str, Any]] | None
    compute_loss_func: Callable[..., Any] | None
    preprocess_logits_for_metrics: Callable[..., Any] | None
    optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None
    neftune_noise_alpha: float | None

    # --- where it runs
    driver_session: DriverSession
    _session_of_arguments: DriverSession | None = None
    """The session that opened the process group before the Trainer existed."""
    accelerator: Accelerator
    model_wrapped: Any
    """The model as the driver calls it."""
    optimizer: Optimizer | None
    lr_scheduler: LRScheduler | None
    is_model_parallel: bool
    place_model_on_device: bool
    is_deepspeed_enabled: bool

    # --- what the model is like
    label_names: list[str]
    label_smoother: LabelSmoother | None
    can_return_loss: bool
    model_accepts_loss_kwargs: bool
    _loss_shifts_labels: bool

    # --- how far it is
    state: TrainerState
    control: TrainerControl
    callback_handler: CallbackHandler
    is_in_train: bool
    gather_function: Callable[..., Any]
    current_flos: float
    _memory_tracker: Any
    _train_batch_size: int
    _created_lr_scheduler: bool
    _globalstep_last_logged: int
    _initial_global_step: int
    _initial_num_input_tokens_seen: int
    _total_loss_scalar: float
    _tr_loss: Tensor
    """Sum of the losses since the last log, in a subclass with its own training loop."""
    is_distributed_loading_by_transformers = False
    """Always False: a model that was partitioned when it was loaded is refused."""
    _buffer_shapes: dict[str, torch.Size]
    """The shapes of the buffers when training began."""
    _num_saved = 0
    """Checkpoints that this call of `train` saved."""
    _save_error: SaveFailed | None = None
    """The reason of the last failed save."""
    _lock: RunLock | None = None
    """Lock of the output folder while `train` runs."""
    _training: TrainLoop | None = None
    """The loop, while `train` runs."""
    _training_data: Any = None
    """The data of the loop, which `TrainLoop.data` may enclose."""
    _interrupted: TrainLoop | None = None
    """The loop that ran out of memory, until the next loop continues from its state."""
    _microstep: Microstep | None = None
    _last_outcome: Outcome | None = None

    # --- of a search
    hp_search_backend: Any = None
    hp_space: Any = None
    hp_name: Any = None
    objective: Any = None
    compute_objective: Any = None
    _trial: Any = None

    def is_world_process_zero(self) -> bool:
        """True if this is the first process of all."""
        raise NotImplementedError

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """See `CheckpointMixin`."""
        raise NotImplementedError

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """See `TrainingMixin`."""
        raise NotImplementedError

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """See `EvaluationMixin`."""
        raise NotImplementedError

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """See `StepMixin`."""
        raise NotImplementedError

    def _tune_save_checkpoint(self, checkpoint_dir: str) -> None:
        raise NotImplementedError

    def create_accelerator_and_postprocess(self) -> None:
        """See `Trainer`."""
        raise NotImplementedError

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """See `Trainer`."""
        raise NotImplementedError

    def _seed(self) -> None:
        raise NotImplementedError

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        raise NotImplementedError

    def _running(self) -> TrainLoop:
        """Return the loop of the active call of `train`."""
        assert self._training is not None
        return self._training

    def _has_own(self, name: str) -> bool:
        """True if a subclass overrides a method without calling ours."""
        return is_replaced(type(self), name)

    def _optimizer_there_is(self) -> Optimizer:
        if self.optimizer is None:
            raise ValueError("the trainer has no optimizer yet: train, or call create_optimizer")
        return self.optimizer
