"""TrainingArguments: every argument of a run, with its default and a line of help.

Names, order and defaults are those of transformers 5.23; the last ones are drivetrain's own.
`resolve.py` and `validate.py` process the values; `derived.py`, `setters.py` and `serialize.py`
hold further methods, and `old_names.py` maps older names.
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

__all__ = ["Seq2SeqTrainingArguments", "TrainingArguments", "arg"]


def arg(default: Any, text: str, **parsed: Any) -> Any:
    """Make a field with a default, the line that `--help` shows, and options of the command line's
    parser."""
    metadata = {"help": text, **parsed}
    if isinstance(default, list):
        return field(default_factory=list, metadata=metadata)
    return field(default=default, metadata=metadata)


_FLAG = {"nargs": "?", "const": True}
"""Options of a command-line flag: its name without a value means True."""


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
    output_dir: str | None = arg(None, "Folder of checkpoints and results; trainer_output if none")
    per_device_train_batch_size: int = arg(8, "Samples in one forward of one process in training")
    num_train_epochs: float = arg(3.0, "Times to go through the training data; may be fractional")
    max_steps: int = arg(-1, "If above 0, the number of updates in all; beats num_train_epochs")

    # --- learning rate
    learning_rate: float = arg(5e-5, "Learning rate after the warm-up")
    lr_scheduler_type: SchedulerType | str = arg("linear", "Schedule of the learning rate")
    lr_scheduler_kwargs: dict[str, Any] | str | None = arg(None, "Arguments of that schedule")
    warmup_steps: float = arg(0, "Updates of warm-up; below 1, as a share of all updates")

    # --- optimizer
    optim: OptimizerNames | str = arg("adamw_torch_fused", "The optimizer")
    optim_args: str | None = arg(None, "Arguments of the optimizer, as key=value,key=value")
    weight_decay: float = arg(0.0, "Weight decay; none for biases and norms")
    adam_beta1: float = arg(0.9, "Decay of Adam's first moment")
    adam_beta2: float = arg(0.999, "Decay of Adam's second moment")
    adam_epsilon: float = arg(1e-8, "Epsilon of Adam")
    optim_target_modules: None | str | list[str] = arg(
        None, "Modules that a low-rank optimizer projects: parts of names, a regex, or all-linear"
    )

    # --- gradients and loss
    gradient_accumulation_steps: int = arg(1, "Batches whose gradients make one update")
    average_tokens_across_devices: bool = arg(
        True, "Divide the loss by the number of tokens of all processes, not of each"
    )
    max_grad_norm: float = arg(1.0, "Limit of the global gradient norm; 0 never clips")
    label_smoothing_factor: float = arg(0.0, "Share of probability that labels leave to others")

    # --- precision
    bf16: bool = arg(False, "Compute in bfloat16, with float32 weights")
    fp16: bool = arg(False, "Compute in float16, with float32 weights and a scaled loss")
    bf16_full_eval: bool = arg(False, "Cast the model to bfloat16 to evaluate without training")
    fp16_full_eval: bool = arg(False, "Cast the model to float16 to evaluate without training")
    tf32: bool | None = arg(None, "Whether float32 matrix products may use TF32")

    # --- memory and speed
    activation_checkpointing: bool | None = arg(
        None, "Compute activations again in the backward pass instead of keeping them", **_FLAG
    )
    activation_checkpointing_kwargs: dict[str, Any] | str | None = arg(
        None, "Arguments of activation checkpointing"
    )
    gradient_checkpointing: bool | None = arg(None, "Old name of activation_checkpointing", **_FLAG)
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = arg(
        None, "Old name of activation_checkpointing_kwargs"
    )
    torch_compile: bool = arg(False, "Compile the model with torch.compile")
    torch_compile_backend: str | None = arg(None, "Backend of torch.compile; turns it on")
    torch_compile_mode: str | None = arg(None, "Mode of torch.compile; turns it on")
    use_liger_kernel: bool = arg(False, "Replace layers by Liger's Triton kernels")
    liger_kernel_config: dict[str, bool] | None = arg(None, "Which of those kernels")
    use_cache: bool = arg(False, "The model's cache of keys and values while training")
    neftune_noise_alpha: float | None = arg(None, "Strength of noise on embeddings (NEFTune)")
    torch_empty_cache_steps: int | None = arg(None, "Updates between emptying the device's cache")
    auto_find_batch_size: bool = arg(
        False, "When memory runs out, take a smaller batch and start again"
    )

    # --- logging
    logging_strategy: IntervalStrategy | str = arg("steps", "When to log: no, steps or epoch")
    logging_steps: float = arg(500, "Updates between logs; below 1, as a share of all updates")
    logging_first_step: bool = arg(False, "Log the first update, too")
    log_on_each_node: bool = arg(True, "One process of each machine logs, not one in all")
    logging_nan_inf_filter: bool = arg(
        True, "Count a loss that is not finite as the mean since the last log, in logs alone"
    )
    include_num_input_tokens_seen: str | bool = arg(
        "no", "Count input tokens: no, all or non_padding"
    )
    log_level: str = arg(
        "passive", "Level of log messages of the main process", choices=CHOICES["log_level"]
    )
    log_level_replica: str = arg(
        "warning", "Level of log messages of the others", choices=CHOICES["log_level_replica"]
    )
    disable_tqdm: bool | None = arg(None, "Print logs instead of showing a progress bar")
    report_to: None | str | list[str] = arg("none", "Trackers to report to; none, all or names")
    run_name: str | None = arg(None, "Name of the run for trackers")
    project: str = arg("huggingface", "Project of the run in Trackio")
    trackio_space_id: str | None = arg(None, "Space in which Trackio shows the run")
    trackio_bucket_id: str | None = arg(None, "Bucket in which Trackio stores the run")
    trackio_static_space_id: str | None | Literal[False] = arg(
        None, "Static Space in which Trackio shows the run"
    )

    # --- evaluation
    eval_strategy: IntervalStrategy | str = arg("no", "When to evaluate: no, steps or epoch")
    eval_steps: float | None = arg(
        None, "Updates between evaluations, or a share of all; logging_steps if none"
    )
    eval_delay: float = arg(0, "Updates or epochs to wait before the first evaluation")
    per_device_eval_batch_size: int = arg(8, "Samples in one forward of one process in evaluation")
    prediction_loss_only: bool = arg(False, "Give only the loss in evaluation and prediction")
    eval_on_start: bool = arg(False, "Evaluate before the first update")
    eval_do_concat_batches: bool = arg(
        True, "Join the predictions of all batches; otherwise keep a list of them"
    )
    eval_use_gather_object: bool = arg(False, "Gather predictions that are not tensors")
    eval_accumulation_steps: int | None = arg(
        None, "Batches after which predictions are moved to host memory; all at the end if none"
    )
    include_for_metrics: list[str] = arg([], "What metrics get besides: inputs, loss")
    batch_eval_metrics: bool = arg(False, "Compute metrics batch by batch")

    # --- checkpoints
    save_only_model: bool = arg(False, "Save no optimizer, schedule and random state")
    save_strategy: SaveStrategy | str = arg("steps", "When to save: no, steps, epoch or best")
    save_steps: float = arg(500, "Updates between checkpoints; below 1, as a share of all updates")
    save_on_each_node: bool = arg(False, "Every machine saves, for want of a shared disk")
    save_total_limit: int | None = arg(None, "How many checkpoints to keep; all if none")
    enable_jit_checkpoint: bool = arg(False, "Save a checkpoint when SIGTERM comes, then stop")

    # --- hub
    push_to_hub: bool = arg(False, "Make a repository on the Hub and upload each save")
    hub_token: str | None = arg(None, "Token that may write to it")
    hub_private_repo: bool | None = arg(None, "Whether a new repository is private")
    hub_model_id: str | None = arg(None, "Name of the repository; that of output_dir if none")
    hub_strategy: HubStrategy | str = arg("every_save", "What is uploaded, and when")
    hub_always_push: bool = arg(False, "Upload even while the last upload is under way")
    hub_revision: str | None = arg(None, "Branch or tag to upload to")

    # --- the best model, and resuming
    load_best_model_at_end: bool = arg(False, "Load the best checkpoint's weights in the end")
    metric_for_best_model: str | None = arg(None, "The metric that decides which is best")
    greater_is_better: bool | None = arg(None, "Whether a greater metric is better")
    ignore_data_skip: bool = arg(False, "Start the epoch over when resuming")
    restore_callback_states_from_checkpoint: bool = arg(
        False, "Bring callbacks back to their state in the checkpoint"
    )

    # --- what is repeatable
    full_determinism: bool = arg(False, "Use deterministic algorithms only")
    seed: int = arg(42, "Seed of everything that is random")
    data_seed: int | None = arg(None, "Seed of the order of samples; seed if none")

    # --- hardware
    use_cpu: bool = arg(False, "Train on the CPU, whatever else there is")
    accelerator_config: dict[str, Any] | str | None = arg(
        None, "How batches are split over processes: dict, JSON file or AcceleratorConfig"
    )
    parallelism_config: Any = arg(
        None, "accelerate's ParallelismConfig: ranks that cut layers, sequences and weights"
    )

    # --- data
    dataloader_drop_last: bool = arg(False, "Drop the last batch where it is not full")
    dataloader_num_workers: int = arg(0, "Processes that load data; 0 loads in the main process")
    dataloader_pin_memory: bool = arg(True, "Load batches into page-locked memory")
    dataloader_persistent_workers: bool = arg(False, "Keep loader processes between epochs")
    dataloader_prefetch_factor: int | None = arg(None, "Batches that each worker loads ahead")
    dataloader_multiprocessing_context: str | None = arg(
        None,
        "How workers are started: fork, spawn or forkserver",
        choices=CHOICES["dataloader_multiprocessing_context"],
    )
    dataloader_in_order: bool = arg(True, "Yield batches in the order of the sampler")
    remove_unused_columns: bool = arg(True, "Drop columns that the model's forward does not take")
    label_names: list[str] | None = arg(None, "Keys of a batch that are labels")
    train_sampling_strategy: str = arg(
        "random",
        "Order of samples: random, sequential, group_by_length or batch_rebalance",
        choices=CHOICES["train_sampling_strategy"],
    )
    length_column_name: str = arg("length", "Column that holds the lengths of samples")

    # --- several processes
    ddp_find_unused_parameters: bool | None = arg(
        None, "Look after each forward for parameters that took no part"
    )
    ddp_bucket_cap_mb: int | None = arg(None, "Size of the buckets that gradients travel in")
    ddp_broadcast_buffers: bool | None = arg(None, "Send process 0's buffers to all in a forward")
    ddp_static_graph: bool | None = arg(None, "Every update uses the same parameters")
    ddp_backend: str | None = arg(
        None,
        "Library that processes talk over: nccl, gloo, xccl",
        choices=("nccl", "gloo", "mpi", "xccl", "hccl", "cncl", "mccl"),
    )
    ddp_timeout: int = arg(1800, "Seconds after which a collective call has failed")
    fsdp: str | None = arg(
        None, "Shard weights, gradients and optimizer state over processes", **_FLAG
    )
    fsdp_config: dict[str, Any] | str | None = arg(None, "How: a dict or a JSON file")
    deepspeed: dict[str, Any] | str | None = arg(None, "DeepSpeed's configuration, dict or JSON")

    # --- looking into it
    debug: str | list[DebugOption] = arg("", "underflow_overflow, tpu_metrics_debug, or both")
    skip_memory_metrics: bool = arg(True, "Do not measure memory")

    # --- for scripts
    do_train: bool = arg(False, "For scripts: whether to train")
    do_eval: bool = arg(False, "For scripts: whether to evaluate; set by eval_strategy")
    do_predict: bool = arg(False, "For scripts: whether to predict")
    resume_from_checkpoint: str | None = arg(None, "For scripts: the checkpoint to resume from")
    local_rank: int = arg(-1, "Which process of this machine this is; the launcher says so")

    # --- drivetrain's own
    backend: str | None = arg(None, "The driver: cpu, ddp, fsdp, deepspeed, xla, ipex, xpu, ...")
    backend_options: dict[str, Any] | str | None = arg(None, "Options of that driver")
    profile: Literal["5.23", "4.47"] = arg("5.23", "Version of transformers whose numbers to give")
    stall_seconds: float | None = arg(
        30.0, "Seconds after which a rank that is late is named; one that is dead ends the run"
    )
    checkpoint_format: Literal["drivetrain", "hf"] = arg(
        "drivetrain", "Layout of optimizer and state in checkpoints; models are always HF's"
    )
    resume_hyper_parameters: Literal["checkpoint", "arguments"] = arg(
        "checkpoint", "Whose learning rate, decay, betas and so on apply when a run is resumed"
    )
    fp8: bool = arg(False, "Compute linear layers in float8, by torchao, and all else as bf16")
    time_parts: bool = arg(
        False, "Add to each log the seconds of each part of the time, and warn of remarkable parts"
    )
    find_synchronisations: bool = arg(
        False, "Warn of lines of your code at which the host waits for the device; slow"
    )
    stats_steps: int | None = arg(
        None, "Steps between logs of norms, zeros and non-finite values of each parameter"
    )
    stats_activations: list[str] | None = arg(
        None, "Modules, or patterns of their names, whose activations these logs measure, too"
    )
    memory_parts: bool = arg(
        False, "Report what takes memory after the first step, and when memory runs out"
    )
    find_nonfinite: bool = arg(
        False, "Name the first tensor that is not finite, after a step that is not"
    )
    run_records: bool = arg(
        False, "Write records into output_dir/records, for drivetrain report, compare and replays"
    )
    replay_step: int | None = arg(
        None, "Train this recorded step again, compare it with its record, and end the process"
    )
    preemption_notice: list[str] | None = arg(
        None, "Save and stop on these notices: file:/path, command:..., signal:SIGUSR2"
    )

    def __post_init__(self) -> None:
        resolve(self)

    def _validate_args(self) -> None:
        """Called while the arguments are resolved; for subclasses that check more."""
        validate(self)


@dataclass(repr=False)
class Seq2SeqTrainingArguments(TrainingArguments):
    """`TrainingArguments`, and how to generate."""

    sortish_sampler: bool = arg(False, "Accepted for old scripts; use train_sampling_strategy")
    predict_with_generate: bool = arg(False, "Compute metrics on generated texts")
    generation_max_length: int | None = arg(None, "Longest text to generate in evaluation")
    generation_num_beams: int | None = arg(None, "Beams to generate with in evaluation")
    generation_config: str | Path | Any | None = arg(
        None, "GenerationConfig, its path or id; replaces the model's"
    )
