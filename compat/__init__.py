"""The Hugging Face API on drivetrain's kernel: the names, signatures and numbers of HF's Trainer.

Names are imported on first use, so that importing this package is cheap.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from .logs import show as _show
from .theirs import theirs as _theirs

if _TYPE_CHECKING:
    from .accelerate.accelerator import Accelerator as Accelerator
    from .accelerate.config_file import from_accelerate_config as from_accelerate_config
    from .arguments import AcceleratorConfig as AcceleratorConfig
    from .arguments import Seq2SeqTrainingArguments as Seq2SeqTrainingArguments
    from .arguments import TrainingArguments as TrainingArguments
    from .arguments.processes import DistributedType as DistributedType
    from .callbacks.base import CallbackHandler as CallbackHandler
    from .callbacks.base import TrainerCallback as TrainerCallback
    from .callbacks.flow_callbacks import DEFAULT_CALLBACKS as DEFAULT_CALLBACKS
    from .callbacks.flow_callbacks import DefaultFlowCallback as DefaultFlowCallback
    from .callbacks.flow_callbacks import EarlyStoppingCallback as EarlyStoppingCallback
    from .callbacks.progress import DEFAULT_PROGRESS_CALLBACK as DEFAULT_PROGRESS_CALLBACK
    from .callbacks.progress import PrinterCallback as PrinterCallback
    from .callbacks.progress import ProgressCallback as ProgressCallback
    from .callbacks.state import ExportableState as ExportableState
    from .callbacks.state import TrainerControl as TrainerControl
    from .callbacks.state import TrainerState as TrainerState
    from .checkpoints.rotation import rotate_checkpoints as rotate_checkpoints
    from .checkpoints.rotation import sort_checkpoints as sort_checkpoints
    from .common.loss import LabelSmoother as LabelSmoother
    from .common.metrics import metrics_format as metrics_format
    from .common.metrics import speed_metrics as speed_metrics
    from .common.seeding import enable_full_determinism as enable_full_determinism
    from .common.seeding import set_seed as set_seed
    from .data.collators import DataCollator as DataCollator
    from .data.collators import default_data_collator as default_data_collator
    from .data.columns import RemoveColumnsCollator as RemoveColumnsCollator
    from .data.lengths import has_length as has_length
    from .data.rank_batches import IterableDatasetShard as IterableDatasetShard
    from .data.workers import seed_worker as seed_worker
    from .enums import DebugOption as DebugOption
    from .enums import FSDPOption as FSDPOption
    from .enums import HPSearchBackend as HPSearchBackend
    from .enums import HubStrategy as HubStrategy
    from .enums import IntervalStrategy as IntervalStrategy
    from .enums import OptimizerNames as OptimizerNames
    from .enums import ParallelMode as ParallelMode
    from .enums import SaveStrategy as SaveStrategy
    from .enums import SchedulerType as SchedulerType
    from .errors import ArgumentError as ArgumentError
    from .errors import ArgumentRefused as ArgumentRefused
    from .errors import UnknownArgument as UnknownArgument
    from .evaluation.nested import EvalLoopContainer as EvalLoopContainer
    from .evaluation.nested import denumpify_detensorize as denumpify_detensorize
    from .evaluation.nested import find_batch_size as find_batch_size
    from .evaluation.nested import nested_concat as nested_concat
    from .evaluation.nested import nested_detach as nested_detach
    from .evaluation.nested import nested_gather as nested_gather
    from .evaluation.nested import nested_numpify as nested_numpify
    from .evaluation.nested import nested_truncate as nested_truncate
    from .evaluation.outputs import BestRun as BestRun
    from .evaluation.outputs import EvalLoopOutput as EvalLoopOutput
    from .evaluation.outputs import EvalPrediction as EvalPrediction
    from .evaluation.outputs import PredictionOutput as PredictionOutput
    from .evaluation.outputs import TrainOutput as TrainOutput
    from .install import install as install
    from .install import uninstall as uninstall
    from .integrations.search import default_compute_objective as default_compute_objective
    from .names import FSDP_MODEL_NAME as FSDP_MODEL_NAME
    from .names import OPTIMIZER_NAME as OPTIMIZER_NAME
    from .names import OPTIMIZER_NAME_BIN as OPTIMIZER_NAME_BIN
    from .names import PREFIX_CHECKPOINT_DIR as PREFIX_CHECKPOINT_DIR
    from .names import SCALER_NAME as SCALER_NAME
    from .names import SCHEDULER_NAME as SCHEDULER_NAME
    from .names import TRAINER_STATE_NAME as TRAINER_STATE_NAME
    from .names import TRAINING_ARGS_NAME as TRAINING_ARGS_NAME
    from .names import get_last_checkpoint as get_last_checkpoint
    from .optim.layerwise import LayerWiseDummyOptimizer as LayerWiseDummyOptimizer
    from .optim.layerwise import LayerWiseDummyScheduler as LayerWiseDummyScheduler
    from .optim.parameters import get_model_param_count as get_model_param_count
    from .optim.parameters import get_parameter_names as get_parameter_names
    from .optim.schedules import get_scheduler as get_scheduler
    from .trainer.seq2seq import Seq2SeqTrainer as Seq2SeqTrainer
    from .trainer.trainer import Trainer as Trainer

    # theirs
    BatchRebalanceSampler: _Any
    DataCollatorWithPadding: _Any
    DefaultDataCollator: _Any
    GreedyLR: _Any
    LengthGroupedSampler: _Any
    TrainerMemoryTracker: _Any
    get_length_grouped_indices: _Any

_COLLATORS = "transformers.data.data_collator"
_NAMES = {
    "accelerate.accelerator": "Accelerator",
    "accelerate.config_file": "from_accelerate_config",
    "arguments": "AcceleratorConfig Seq2SeqTrainingArguments TrainingArguments",
    "arguments.processes": "DistributedType",
    "callbacks.base": "CallbackHandler TrainerCallback",
    "callbacks.flow_callbacks": "DEFAULT_CALLBACKS DefaultFlowCallback EarlyStoppingCallback",
    "callbacks.progress": "DEFAULT_PROGRESS_CALLBACK PrinterCallback ProgressCallback",
    "callbacks.state": "ExportableState TrainerControl TrainerState",
    "checkpoints.rotation": "rotate_checkpoints sort_checkpoints",
    "common.loss": "LabelSmoother",
    "common.metrics": "metrics_format speed_metrics",
    "common.seeding": "enable_full_determinism set_seed",
    "data.collators": "DataCollator default_data_collator",
    "data.columns": "RemoveColumnsCollator",
    "data.lengths": "has_length",
    "data.rank_batches": "IterableDatasetShard",
    "data.workers": "seed_worker",
    "enums": (
        "DebugOption FSDPOption HPSearchBackend HubStrategy IntervalStrategy OptimizerNames"
        " ParallelMode SaveStrategy SchedulerType"
    ),
    "errors": "ArgumentError ArgumentRefused UnknownArgument",
    "evaluation.nested": (
        "EvalLoopContainer denumpify_detensorize find_batch_size nested_concat nested_detach"
        " nested_gather nested_numpify nested_truncate"
    ),
    "evaluation.outputs": "BestRun EvalLoopOutput EvalPrediction PredictionOutput TrainOutput",
    "install": "install uninstall",
    "integrations.search": "default_compute_objective",
    "names": (
        "FSDP_MODEL_NAME OPTIMIZER_NAME OPTIMIZER_NAME_BIN PREFIX_CHECKPOINT_DIR SCALER_NAME"
        " SCHEDULER_NAME TRAINER_STATE_NAME TRAINING_ARGS_NAME get_last_checkpoint"
    ),
    "optim.layerwise": "LayerWiseDummyOptimizer LayerWiseDummyScheduler",
    "optim.parameters": "get_model_param_count get_parameter_names",
    "optim.schedules": "get_scheduler",
    "trainer.seq2seq": "Seq2SeqTrainer",
    "trainer.trainer": "Trainer",
    _COLLATORS: "DataCollatorWithPadding DefaultDataCollator",
    "transformers.optimization": "GreedyLR",
    "transformers.trainer_pt_utils": (
        "BatchRebalanceSampler LengthGroupedSampler get_length_grouped_indices"
    ),
    "transformers.trainer_utils": "TrainerMemoryTracker",
}
"""The public names of each module, in this package or in transformers."""
_HOMES = dict(sorted((name, home) for home, names in _NAMES.items() for name in names.split()))

if not _TYPE_CHECKING:  # type checkers go by the imports above
    __all__ = list(_HOMES)

_show()


def __getattr__(name: str) -> _Any:
    home = _HOMES.get(name) or (_COLLATORS if name.startswith("DataCollator") else None)
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
