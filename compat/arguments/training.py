"""TrainingArguments: every argument of a run, its default, and a line on what it does.

Names, order and defaults are those of transformers 5.23; the last four are drivetrain's own.
`resolve.py` and `validate.py` work on the values; `derived.py`, `setters.py` and `serialize.py`
hold what else an instance can do, and `old_names.py` what became of older names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from ..enums import (
    DebugOption,
    HubStrategy,
    IntervalStrategy,
    OptimizerNames,
    SaveStrategy,
    SchedulerType,
)
from .derived import DerivedValues
from .old_names import OldNames
from .resolve import resolve
from .serialize import Serialization
from .setters import Setters
from .validate import CHOICES, validate

__all__ = ["Seq2SeqTrainingArguments", "TrainingArguments", "says"]


def says(default: Any, text: str, **parsed: Any) -> Any:
    """A field with a default, the line that `--help` shows, and how a command line is parsed."""
    metadata = {"help": text, **parsed}
    if isinstance(default, list):
        return field(default_factory=list, metadata=metadata)
    return field(default=default, metadata=metadata)


_FLAG = {"nargs": "?", "const": True}
"""Of a command line: the name without a value is True."""


@dataclass(repr=False)
class TrainingArguments(DerivedValues, Setters, Serialization, metaclass=OldNames):
    """Training, logs, evaluations and saves of a run; `backend` and its fields name the hardware.

    Names that transformers had until 4.47 are accepted with a `FutureWarning` and mapped, or
    refused with the reason (`UnknownArgument`). `profile="4.47"` brings the defaults and numbers of
    that version back. Wrong values raise `ArgumentError`, a `ValueError`.
    """

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [
        "accelerator_config",
        "fsdp_config",
        "deepspeed",
        "activation_checkpointing_kwargs",
        "gradient_checkpointing_kwargs",
        "lr_scheduler_kwargs",
        "backend_options",
    ]
    """Fields that hold a dict, and also take it as a JSON text from a command line."""
    default_optim: ClassVar[str] = "adamw_torch_fused"

    # --- how long, how much
    output_dir: str | None = says(None, "Folder of checkpoints and results; trainer_output if none")
    per_device_train_batch_size: int = says(8, "Samples in one forward of one process in training")
    num_train_epochs: float = says(3.0, "Times to go through the training data; may be fractional")
    max_steps: int = says(-1, "If above 0, the number of updates in all; beats num_train_epochs")

    # --- learning rate
    learning_rate: float = says(5e-5, "Learning rate after the warm-up")
    lr_scheduler_type: SchedulerType | str = says("linear", "How the learning rate goes on")
    lr_scheduler_kwargs: dict[str, Any] | str | None = says(None, "Arguments of that schedule")
    warmup_steps: float = says(0, "Updates of warm-up; below 1, as a share of all updates")

    # --- optimizer
    optim: OptimizerNames | str = says("adamw_torch_fused", "The optimizer")
    optim_args: str | None = says(None, "Arguments of the optimizer, as key=value,key=value")
    weight_decay: float = says(0.0, "Weight decay; none for biases and norms")
    adam_beta1: float = says(0.9, "Decay of Adam's first moment")
    adam_beta2: float = says(0.999, "Decay of Adam's second moment")
    adam_epsilon: float = says(1e-8, "Epsilon of Adam")
    optim_target_modules: None | str | list[str] = says(
        None, "Modules that a low-rank optimizer projects: parts of names, a regex, or all-linear"
    )

    # --- gradients and loss
    gradient_accumulation_steps: int = says(1, "Batches whose gradients make one update")
    average_tokens_across_devices: bool = says(
        True, "Divide the loss by the number of tokens of all processes, not of each"
    )
    max_grad_norm: float = says(1.0, "Limit of the global gradient norm; 0 never clips")
    label_smoothing_factor: float = says(0.0, "Share of probability that labels leave to others")

    # --- precision
    bf16: bool = says(False, "Compute in bfloat16, with float32 weights")
    fp16: bool = says(False, "Compute in float16, with float32 weights and a scaled loss")
    bf16_full_eval: bool = says(False, "Cast the model to bfloat16 to evaluate without training")
    fp16_full_eval: bool = says(False, "Cast the model to float16 to evaluate without training")
    tf32: bool | None = says(None, "Whether float32 matrix products may use TF32")

    # --- memory and speed
    activation_checkpointing: bool | None = says(
        None, "Compute activations again in the backward pass instead of keeping them", **_FLAG
    )
    activation_checkpointing_kwargs: dict[str, Any] | str | None = says(
        None, "Arguments of activation checkpointing"
    )
    gradient_checkpointing: bool | None = says(
        None, "Old name of activation_checkpointing", **_FLAG
    )
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = says(
        None, "Old name of activation_checkpointing_kwargs"
    )
    torch_compile: bool = says(False, "Compile the model with torch.compile")
    torch_compile_backend: str | None = says(None, "Backend of torch.compile; turns it on")
    torch_compile_mode: str | None = says(None, "Mode of torch.compile; turns it on")
    use_liger_kernel: bool = says(False, "Replace layers by Liger's Triton kernels")
    liger_kernel_config: dict[str, bool] | None = says(None, "Which of those kernels")
    use_cache: bool = says(False, "The model's cache of keys and values while training")
    neftune_noise_alpha: float | None = says(None, "Strength of noise on embeddings (NEFTune)")
    torch_empty_cache_steps: int | None = says(None, "Updates between emptying the device's cache")
    auto_find_batch_size: bool = says(
        False, "When memory runs out, take a smaller batch and start again"
    )

    # --- logging
    logging_strategy: IntervalStrategy | str = says("steps", "When to log: no, steps or epoch")
    logging_steps: float = says(500, "Updates between logs; below 1, as a share of all updates")
    logging_first_step: bool = says(False, "Log the first update, too")
    log_on_each_node: bool = says(True, "One process of each machine logs, not one in all")
    logging_nan_inf_filter: bool = says(
        True, "Count a loss that is not finite as the mean since the last log, in logs alone"
    )
    include_num_input_tokens_seen: str | bool = says(
        "no", "Count input tokens: no, all or non_padding"
    )
    log_level: str = says(
        "passive", "Level of log messages of the main process", choices=CHOICES["log_level"]
    )
    log_level_replica: str = says(
        "warning", "Level of log messages of the others", choices=CHOICES["log_level_replica"]
    )
    disable_tqdm: bool | None = says(None, "Print logs instead of showing a progress bar")
    report_to: None | str | list[str] = says("none", "Trackers to report to; none, all or names")
    run_name: str | None = says(None, "Name of the run for trackers")
    project: str = says("huggingface", "Project of the run in Trackio")
    trackio_space_id: str | None = says(None, "Space in which Trackio shows the run")
    trackio_bucket_id: str | None = says(None, "Bucket in which Trackio stores the run")
    trackio_static_space_id: str | None | Literal[False] = says(
        None, "Static Space in which Trackio shows the run"
    )

    # --- evaluation
    eval_strategy: IntervalStrategy | str = says("no", "When to evaluate: no, steps or epoch")
    eval_steps: float | None = says(
        None, "Updates between evaluations, or a share of all; logging_steps if none"
    )
    eval_delay: float = says(0, "Updates or epochs to wait before the first evaluation")
    per_device_eval_batch_size: int = says(8, "Samples in one forward of one process in evaluation")
    prediction_loss_only: bool = says(False, "Give only the loss in evaluation and prediction")
    eval_on_start: bool = says(False, "Evaluate before the first update")
    eval_do_concat_batches: bool = says(
        True, "Join the predictions of all batches; otherwise keep a list of them"
    )
    eval_use_gather_object: bool = says(False, "Gather predictions that are not tensors")
    eval_accumulation_steps: int | None = says(
        None, "Batches after which predictions are moved to host memory; all at the end if none"
    )
    include_for_metrics: list[str] = says([], "What metrics get besides: inputs, loss")
    batch_eval_metrics: bool = says(False, "Compute metrics batch by batch")

    # --- checkpoints
    save_only_model: bool = says(False, "Save no optimizer, schedule and random state")
    save_strategy: SaveStrategy | str = says("steps", "When to save: no, steps, epoch or best")
    save_steps: float = says(500, "Updates between checkpoints; below 1, as a share of all updates")
    save_on_each_node: bool = says(False, "Every machine saves, for want of a shared disk")
    save_total_limit: int | None = says(None, "How many checkpoints to keep; all if none")
    enable_jit_checkpoint: bool = says(False, "Save a checkpoint when SIGTERM comes, then stop")

    # --- hub
    push_to_hub: bool = says(False, "Make a repository on the Hub and upload each save")
    hub_token: str | None = says(None, "Token that may write to it")
    hub_private_repo: bool | None = says(None, "Whether a new repository is private")
    hub_model_id: str | None = says(None, "Name of the repository; that of output_dir if none")
    hub_strategy: HubStrategy | str = says("every_save", "What is uploaded, and when")
    hub_always_push: bool = says(False, "Upload even while the last upload is under way")
    hub_revision: str | None = says(None, "Branch or tag to upload to")

    # --- the best model, and going on
    load_best_model_at_end: bool = says(False, "Load the best checkpoint's weights in the end")
    metric_for_best_model: str | None = says(None, "The metric that decides which is best")
    greater_is_better: bool | None = says(None, "Whether a greater metric is better")
    ignore_data_skip: bool = says(False, "Begin the epoch anew when resuming")
    restore_callback_states_from_checkpoint: bool = says(
        False, "Bring callbacks back to their state in the checkpoint"
    )

    # --- what is repeatable
    full_determinism: bool = says(False, "Use deterministic algorithms only")
    seed: int = says(42, "Seed of everything that is random")
    data_seed: int | None = says(None, "Seed of the order of samples; seed if none")

    # --- hardware
    use_cpu: bool = says(False, "Train on the CPU, whatever else there is")
    accelerator_config: dict[str, Any] | str | None = says(
        None, "How batches are dealt to processes: dict, JSON file or AcceleratorConfig"
    )
    parallelism_config: Any = says(
        None, "accelerate's ParallelismConfig: ranks that cut layers, sequences and weights"
    )

    # --- data
    dataloader_drop_last: bool = says(False, "Drop the last batch where it is not full")
    dataloader_num_workers: int = says(0, "Processes that load data; 0 loads in the main process")
    dataloader_pin_memory: bool = says(True, "Load batches into page-locked memory")
    dataloader_persistent_workers: bool = says(False, "Keep loader processes between epochs")
    dataloader_prefetch_factor: int | None = says(None, "Batches that each worker loads ahead")
    dataloader_multiprocessing_context: str | None = says(
        None,
        "How workers are started: fork, spawn or forkserver",
        choices=CHOICES["dataloader_multiprocessing_context"],
    )
    dataloader_in_order: bool = says(True, "Yield batches in the order of the sampler")
    remove_unused_columns: bool = says(True, "Drop columns that the model's forward does not take")
    label_names: list[str] | None = says(None, "Keys of a batch that are labels")
    train_sampling_strategy: str = says(
        "random",
        "Order of samples: random, sequential, group_by_length or batch_rebalance",
        choices=CHOICES["train_sampling_strategy"],
    )
    length_column_name: str = says("length", "Column that holds the lengths of samples")

    # --- several processes
    ddp_find_unused_parameters: bool | None = says(
        None, "Look after each forward for parameters that took no part"
    )
    ddp_bucket_cap_mb: int | None = says(None, "Size of the buckets that gradients travel in")
    ddp_broadcast_buffers: bool | None = says(None, "Send process 0's buffers to all in a forward")
    ddp_static_graph: bool | None = says(None, "Every update uses the same parameters")
    ddp_backend: str | None = says(
        None,
        "Library that processes talk over: nccl, gloo, xccl",
        choices=("nccl", "gloo", "mpi", "xccl", "hccl", "cncl", "mccl"),
    )
    ddp_timeout: int = says(1800, "Seconds after which a collective call has failed")
    fsdp: str | None = says(
        None, "Shard weights, gradients and optimizer state over processes", **_FLAG
    )
    fsdp_config: dict[str, Any] | str | None = says(None, "How: a dict or a JSON file")
    deepspeed: dict[str, Any] | str | None = says(None, "DeepSpeed's configuration, dict or JSON")

    # --- looking into it
    debug: str | list[DebugOption] = says("", "underflow_overflow, tpu_metrics_debug, or both")
    skip_memory_metrics: bool = says(True, "Do not measure memory")

    # --- for scripts
    do_train: bool = says(False, "For scripts: whether to train")
    do_eval: bool = says(False, "For scripts: whether to evaluate; set by eval_strategy")
    do_predict: bool = says(False, "For scripts: whether to predict")
    resume_from_checkpoint: str | None = says(None, "For scripts: the checkpoint to go on from")
    local_rank: int = says(-1, "Which process of this machine this is; the launcher says so")

    # --- drivetrain's own
    backend: str | None = says(None, "The driver: cpu, ddp, fsdp, deepspeed, xla, ipex, xpu, ...")
    backend_options: dict[str, Any] | str | None = says(None, "Options of that driver")
    profile: Literal["5.23", "4.47"] = says("5.23", "Version of transformers whose numbers to give")
    stall_seconds: float | None = says(
        30.0, "Seconds after which a rank that is late is named; one that is dead ends the run"
    )
    checkpoint_format: Literal["drivetrain", "hf"] = says(
        "drivetrain", "Layout of optimizer and state in checkpoints; models are always HF's"
    )
    fp8: bool = says(False, "Compute linear layers in float8, by torchao, and all else as bf16")

    def __post_init__(self) -> None:
        resolve(self)

    def _validate_args(self) -> None:
        """Called while the arguments are resolved; for subclasses that check more."""
        validate(self)


@dataclass(repr=False)
class Seq2SeqTrainingArguments(TrainingArguments):
    """`TrainingArguments`, and how to generate."""

    sortish_sampler: bool = says(False, "Accepted for old scripts; use train_sampling_strategy")
    predict_with_generate: bool = says(False, "Compute metrics on generated texts")
    generation_max_length: int | None = says(None, "Longest text to generate in evaluation")
    generation_num_beams: int | None = says(None, "Beams to generate with in evaluation")
    generation_config: str | Path | Any | None = says(
        None, "GenerationConfig, its path or id; replaces the model's"
    )
