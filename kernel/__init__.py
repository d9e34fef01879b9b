"""drivetrain's kernel: when, how much, in what order, and what a checkpoint is.

It names no backend and imports none. Read `contract.py` first, then `loop.py`.
"""

from .contract import Recipe
from .errors import DrivetrainError, UsageError
from .loop import Result, fit
from .settings import (
    CheckpointSettings,
    DataSettings,
    EvaluateSettings,
    OptimizerSettings,
    ScheduleSettings,
    Settings,
)

__all__ = [
    "CheckpointSettings",
    "DataSettings",
    "DrivetrainError",
    "EvaluateSettings",
    "OptimizerSettings",
    "Recipe",
    "Result",
    "ScheduleSettings",
    "Settings",
    "UsageError",
    "fit",
]
