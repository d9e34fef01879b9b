"""The Hugging Face surface: its Trainer's names, signatures and numbers, on drivetrain's kernel.

Names are imported when first asked for, so that importing this package stays light.
"""

from importlib import import_module as _import_module
from typing import Any as _Any

from .logs import show as _show
from .theirs import theirs as _theirs

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

__all__ = list(_HOMES)

_show()


def __getattr__(name: str) -> _Any:
    home = _HOMES.get(name) or ("data.collators" if name.startswith("DataCollator") else None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if home.startswith("transformers."):
        value = _theirs(home.removeprefix("transformers."), name)
    else:
        value = getattr(_import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
