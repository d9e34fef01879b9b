"""drivetrain's kernel: when, how much, in what order, and what a checkpoint is.

It names no backend and imports none. Read `contract.py` first, then `loop.py`, `run.py` and
`training.py`.
"""

from .contract import Recipe
from .errors import DrivetrainError, UsageError
from .loop import Result, fit
from .packing import Pack
from .predict import Chunk, predict
from .ready import Batches
from .settings import (
    CheckpointSettings,
    DataSettings,
    EvaluateSettings,
    OptimizerSettings,
    ScheduleSettings,
    Settings,
    SpikeSettings,
)
from .stream import ReadAgain

__all__ = [
    "Batches",
    "CheckpointSettings",
    "Chunk",
    "DataSettings",
    "DrivetrainError",
    "EvaluateSettings",
    "OptimizerSettings",
    "Pack",
    "ReadAgain",
    "Recipe",
    "Result",
    "ScheduleSettings",
    "Settings",
    "SpikeSettings",
    "UsageError",
    "fit",
    "predict",
]
