"""The Hugging Face surface: its Trainer's names, signatures and numbers, on drivetrain's kernel.

Names are imported when first asked for, so that importing this package stays light.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from .logs import show as _show
from .theirs import theirs as _theirs

if _TYPE_CHECKING:
    from .accelerate.accelerator import Accelerator
    from .accelerate.config_file import from_accelerate_config
    from .arguments import AcceleratorConfig, Seq2SeqTrainingArguments, TrainingArguments
    from .arguments.processes import DistributedType
    from .callbacks.base import CallbackHandler, TrainerCallback
    from .callbacks.flow_callbacks import (
        DEFAULT_CALLBACKS,
        DefaultFlowCallback,
        EarlyStoppingCallback,
    )
    from .callbacks.progress import DEFAULT_PROGRESS_CALLBACK, PrinterCallback, ProgressCallback
    from .callbacks.reporting import metrics_format, speed_metrics
    from .callbacks.state import ExportableState, TrainerControl, TrainerState
    from .checkpoints.rotation import rotate_checkpoints, sort_checkpoints
    from .data.collators import (
        DataCollator,
        DataCollatorWithPadding,
        DefaultDataCollator,
        default_data_collator,
    )
    from .data.columns import RemoveColumnsCollator
    from .data.loading import has_length, seed_worker
    from .data.rank_batches import IterableDatasetShard
    from .enums import (
        DebugOption,
        FSDPOption,
        HPSearchBackend,
        HubStrategy,
        IntervalStrategy,
        OptimizerNames,
        ParallelMode,
        SaveStrategy,
        SchedulerType,
    )
    from .errors import ArgumentError, ArgumentRefused, UnknownArgument
    from .evaluation.nested import (
        EvalLoopContainer,
        denumpify_detensorize,
        find_batch_size,
        nested_concat,
        nested_detach,
        nested_gather,
        nested_numpify,
        nested_truncate,
    )
    from .evaluation.outputs import (
        BestRun,
        EvalLoopOutput,
        EvalPrediction,
        PredictionOutput,
        TrainOutput,
    )
    from .install import install, uninstall
    from .integrations.search import default_compute_objective
    from .names import (
        FSDP_MODEL_NAME,
        OPTIMIZER_NAME,
        OPTIMIZER_NAME_BIN,
        PREFIX_CHECKPOINT_DIR,
        SCALER_NAME,
        SCHEDULER_NAME,
        TRAINER_STATE_NAME,
        TRAINING_ARGS_NAME,
        get_last_checkpoint,
    )
    from .optim.layerwise import LayerWiseDummyOptimizer, LayerWiseDummyScheduler
    from .optim.parameters import get_model_param_count, get_parameter_names
    from .optim.schedules import get_scheduler
    from .trainer.loss import LabelSmoother
    from .trainer.seeding import enable_full_determinism, set_seed
    from .trainer.seq2seq import Seq2SeqTrainer
    from .trainer.trainer import Trainer

    # theirs
    BatchRebalanceSampler: _Any
    GreedyLR: _Any
    LengthGroupedSampler: _Any
    TrainerMemoryTracker: _Any
    get_length_grouped_indices: _Any

_HOMES = {
    "DEFAULT_CALLBACKS": "callbacks.flow_callbacks",
    "DEFAULT_PROGRESS_CALLBACK": "callbacks.progress",
    "FSDP_MODEL_NAME": "names",
    "OPTIMIZER_NAME": "names",
    "OPTIMIZER_NAME_BIN": "names",
    "PREFIX_CHECKPOINT_DIR": "names",
    "SCALER_NAME": "names",
    "SCHEDULER_NAME": "names",
    "TRAINER_STATE_NAME": "names",
    "TRAINING_ARGS_NAME": "names",
    "Accelerator": "accelerate.accelerator",
    "AcceleratorConfig": "arguments",
    "ArgumentError": "errors",
    "ArgumentRefused": "errors",
    "BatchRebalanceSampler": "transformers.trainer_pt_utils",
    "BestRun": "evaluation.outputs",
    "CallbackHandler": "callbacks.base",
    "DataCollator": "data.collators",
    "DataCollatorWithPadding": "data.collators",
    "DebugOption": "enums",
    "DefaultDataCollator": "data.collators",
    "DefaultFlowCallback": "callbacks.flow_callbacks",
    "DistributedType": "arguments.processes",
    "EarlyStoppingCallback": "callbacks.flow_callbacks",
    "EvalLoopContainer": "evaluation.nested",
    "EvalLoopOutput": "evaluation.outputs",
    "EvalPrediction": "evaluation.outputs",
    "ExportableState": "callbacks.state",
    "FSDPOption": "enums",
    "GreedyLR": "transformers.optimization",
    "HPSearchBackend": "enums",
    "HubStrategy": "enums",
    "IntervalStrategy": "enums",
    "IterableDatasetShard": "data.rank_batches",
    "LabelSmoother": "trainer.loss",
    "LayerWiseDummyOptimizer": "optim.layerwise",
    "LayerWiseDummyScheduler": "optim.layerwise",
    "LengthGroupedSampler": "transformers.trainer_pt_utils",
    "OptimizerNames": "enums",
    "ParallelMode": "enums",
    "PredictionOutput": "evaluation.outputs",
    "PrinterCallback": "callbacks.progress",
    "ProgressCallback": "callbacks.progress",
    "RemoveColumnsCollator": "data.columns",
    "SaveStrategy": "enums",
    "SchedulerType": "enums",
    "Seq2SeqTrainer": "trainer.seq2seq",
    "Seq2SeqTrainingArguments": "arguments",
    "TrainOutput": "evaluation.outputs",
    "Trainer": "trainer.trainer",
    "TrainerCallback": "callbacks.base",
    "TrainerControl": "callbacks.state",
    "TrainerMemoryTracker": "transformers.trainer_utils",
    "TrainerState": "callbacks.state",
    "TrainingArguments": "arguments",
    "UnknownArgument": "errors",
    "default_compute_objective": "integrations.search",
    "default_data_collator": "data.collators",
    "denumpify_detensorize": "evaluation.nested",
    "enable_full_determinism": "trainer.seeding",
    "find_batch_size": "evaluation.nested",
    "from_accelerate_config": "accelerate.config_file",
    "get_last_checkpoint": "names",
    "get_length_grouped_indices": "transformers.trainer_pt_utils",
    "get_model_param_count": "optim.parameters",
    "get_parameter_names": "optim.parameters",
    "get_scheduler": "optim.schedules",
    "has_length": "data.loading",
    "install": "install",
    "metrics_format": "callbacks.reporting",
    "nested_concat": "evaluation.nested",
    "nested_detach": "evaluation.nested",
    "nested_gather": "evaluation.nested",
    "nested_numpify": "evaluation.nested",
    "nested_truncate": "evaluation.nested",
    "rotate_checkpoints": "checkpoints.rotation",
    "seed_worker": "data.loading",
    "set_seed": "trainer.seeding",
    "sort_checkpoints": "checkpoints.rotation",
    "speed_metrics": "callbacks.reporting",
    "uninstall": "install",
}
"""Each public name and the module that it lives in, here or there; sorted as `__all__` is."""

__all__ = [
    "DEFAULT_CALLBACKS",
    "DEFAULT_PROGRESS_CALLBACK",
    "FSDP_MODEL_NAME",
    "OPTIMIZER_NAME",
    "OPTIMIZER_NAME_BIN",
    "PREFIX_CHECKPOINT_DIR",
    "SCALER_NAME",
    "SCHEDULER_NAME",
    "TRAINER_STATE_NAME",
    "TRAINING_ARGS_NAME",
    "Accelerator",
    "AcceleratorConfig",
    "ArgumentError",
    "ArgumentRefused",
    "BatchRebalanceSampler",
    "BestRun",
    "CallbackHandler",
    "DataCollator",
    "DataCollatorWithPadding",
    "DebugOption",
    "DefaultDataCollator",
    "DefaultFlowCallback",
    "DistributedType",
    "EarlyStoppingCallback",
    "EvalLoopContainer",
    "EvalLoopOutput",
    "EvalPrediction",
    "ExportableState",
    "FSDPOption",
    "GreedyLR",
    "HPSearchBackend",
    "HubStrategy",
    "IntervalStrategy",
    "IterableDatasetShard",
    "LabelSmoother",
    "LayerWiseDummyOptimizer",
    "LayerWiseDummyScheduler",
    "LengthGroupedSampler",
    "OptimizerNames",
    "ParallelMode",
    "PredictionOutput",
    "PrinterCallback",
    "ProgressCallback",
    "RemoveColumnsCollator",
    "SaveStrategy",
    "SchedulerType",
    "Seq2SeqTrainer",
    "Seq2SeqTrainingArguments",
    "TrainOutput",
    "Trainer",
    "TrainerCallback",
    "TrainerControl",
    "TrainerMemoryTracker",
    "TrainerState",
    "TrainingArguments",
    "UnknownArgument",
    "default_compute_objective",
    "default_data_collator",
    "denumpify_detensorize",
    "enable_full_determinism",
    "find_batch_size",
    "from_accelerate_config",
    "get_last_checkpoint",
    "get_length_grouped_indices",
    "get_model_param_count",
    "get_parameter_names",
    "get_scheduler",
    "has_length",
    "install",
    "metrics_format",
    "nested_concat",
    "nested_detach",
    "nested_gather",
    "nested_numpify",
    "nested_truncate",
    "rotate_checkpoints",
    "seed_worker",
    "set_seed",
    "sort_checkpoints",
    "speed_metrics",
    "uninstall",
]

_show()


def __getattr__(name: str) -> _Any:
    home = _HOMES.get(name) or ("data.collators" if name.startswith("DataCollator") else None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if home.startswith("transformers."):
        value = _theirs(home.removeprefix("transformers."), name)
    else:
        value = getattr(_import_module(f".{home}", __name__), name)
    if name in _HOMES:
        globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
