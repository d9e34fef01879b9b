"""The Hugging Face surface: its Trainer's names, signatures and numbers, on drivetrain's kernel.

Names are imported when first asked for, so that importing this package stays light.
"""

from importlib import import_module as _import_module
from typing import Any as _Any

_HOMES = {
    "DEFAULT_CALLBACKS": "flow",
    "DEFAULT_PROGRESS_CALLBACK": "progress",
    "FSDP_MODEL_NAME": "names",
    "OPTIMIZER_NAME": "names",
    "OPTIMIZER_NAME_BIN": "names",
    "PREFIX_CHECKPOINT_DIR": "names",
    "SCALER_NAME": "names",
    "SCHEDULER_NAME": "names",
    "TRAINER_STATE_NAME": "names",
    "TRAINING_ARGS_NAME": "names",
    "Accelerator": "accelerator",
    "AcceleratorConfig": "arguments",
    "ArgumentError": "errors",
    "ArgumentRefused": "errors",
    "BatchRebalanceSampler": "lengths",
    "BestRun": "outputs",
    "CallbackHandler": "callbacks",
    "DataCollator": "collators",
    "DataCollatorWithPadding": "collators",
    "DebugOption": "enums",
    "DefaultDataCollator": "collators",
    "DefaultFlowCallback": "flow",
    "DistributedType": "processes",
    "EarlyStoppingCallback": "flow",
    "EvalLoopContainer": "nested",
    "EvalLoopOutput": "outputs",
    "EvalPrediction": "outputs",
    "ExportableState": "state",
    "FSDPOption": "enums",
    "GreedyLR": "plateau",
    "HPSearchBackend": "enums",
    "HubStrategy": "enums",
    "IntervalStrategy": "enums",
    "IterableDatasetShard": "stream_shard",
    "LabelSmoother": "smoothing",
    "LayerWiseDummyOptimizer": "optim.layerwise",
    "LayerWiseDummyScheduler": "optim.layerwise",
    "LengthGroupedSampler": "lengths",
    "OptimizerNames": "enums",
    "ParallelMode": "enums",
    "PredictionOutput": "outputs",
    "PrinterCallback": "progress",
    "ProgressCallback": "progress",
    "RemoveColumnsCollator": "columns",
    "SaveStrategy": "enums",
    "SchedulerType": "enums",
    "Seq2SeqTrainer": "seq2seq",
    "Seq2SeqTrainingArguments": "arguments",
    "TrainOutput": "outputs",
    "Trainer": "trainer",
    "TrainerCallback": "callbacks",
    "TrainerControl": "state",
    "TrainerMemoryTracker": "memory",
    "TrainerState": "state",
    "TrainingArguments": "arguments",
    "UnknownArgument": "errors",
    "default_compute_objective": "search",
    "default_data_collator": "collators",
    "denumpify_detensorize": "nested",
    "enable_full_determinism": "seeding",
    "find_batch_size": "nested",
    "from_accelerate_config": "arguments.accelerate_file",
    "get_last_checkpoint": "names",
    "get_length_grouped_indices": "lengths",
    "get_model_param_count": "models",
    "get_parameter_names": "models",
    "get_scheduler": "schedules",
    "has_length": "loading",
    "install": "install",
    "metrics_format": "reporting",
    "nested_concat": "nested",
    "nested_detach": "nested",
    "nested_gather": "nested",
    "nested_numpify": "nested",
    "nested_truncate": "nested",
    "rotate_checkpoints": "rotation",
    "seed_worker": "loading",
    "set_seed": "seeding",
    "sort_checkpoints": "rotation",
    "speed_metrics": "speed",
    "uninstall": "install",
}
"""Each public name and the module that it lives in; sorted as `__all__` is."""

__all__ = list(_HOMES)


def __getattr__(name: str) -> _Any:
    home = _HOMES.get(name) or ("collators" if name.startswith("DataCollator") else None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(_import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
