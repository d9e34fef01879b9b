"""Write the training once; choose the hardware with an argument; resume anywhere.

The public names are here, and each is imported on first use, so that `import drivetrain` is cheap:
not even torch is loaded.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING
from typing import Any as _Any

if TYPE_CHECKING:
    from .data.mixture import Mix
    from .data.packing import Pack
    from .data.parallel import Parallel
    from .data.prebatched import Batches
    from .data.stream import ReadAgain
    from .data.tar_shards import TarShards
    from .data.token_shards import TokenShards
    from .kernel.errors import DrivetrainError, UsageError
    from .kernel.recipe import Recipe
    from .ranks.fit import fit
    from .trainer.early_stopping import EarlyStopping
    from .trainer.inference import evaluate
    from .trainer.lora import lora
    from .trainer.loss_parts import LossParts
    from .trainer.predict import predict
    from .trainer.predictions import Chunk
    from .trainer.result import Result
    from .trainer.settings import (
        AverageSettings,
        CheckpointSettings,
        DataSettings,
        EvaluateSettings,
        OptimizerGroup,
        OptimizerSettings,
        ScheduleSettings,
        Settings,
        SpikeSettings,
        StatsSettings,
        StopSettings,
    )
    from .trainer.turns import Models, Turns

    __version__: str

__all__ = [
    "AverageSettings",
    "Batches",
    "CheckpointSettings",
    "Chunk",
    "DataSettings",
    "DrivetrainError",
    "EarlyStopping",
    "EvaluateSettings",
    "LossParts",
    "Mix",
    "Models",
    "OptimizerGroup",
    "OptimizerSettings",
    "Pack",
    "Parallel",
    "ReadAgain",
    "Recipe",
    "Result",
    "ScheduleSettings",
    "Settings",
    "SpikeSettings",
    "StatsSettings",
    "StopSettings",
    "TarShards",
    "TokenShards",
    "Turns",
    "UsageError",
    "__version__",
    "evaluate",
    "fit",
    "lora",
    "predict",
]

_HOMES = {
    "data.mixture": ("Mix",),
    "data.packing": ("Pack",),
    "data.parallel": ("Parallel",),
    "data.prebatched": ("Batches",),
    "data.stream": ("ReadAgain",),
    "data.tar_shards": ("TarShards",),
    "data.token_shards": ("TokenShards",),
    "kernel.errors": ("DrivetrainError", "UsageError"),
    "kernel.recipe": ("Recipe",),
    "ranks.fit": ("fit",),
    "trainer.early_stopping": ("EarlyStopping",),
    "trainer.inference": ("evaluate",),
    "trainer.lora": ("lora",),
    "trainer.loss_parts": ("LossParts",),
    "trainer.predict": ("predict",),
    "trainer.predictions": ("Chunk",),
    "trainer.result": ("Result",),
    "trainer.settings": (
        "OptimizerGroup",
        *(name for name in __all__ if name.endswith("Settings")),
    ),
    "trainer.turns": ("Models", "Turns"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> _Any:
    if name == "__version__":
        from importlib.metadata import version

        value: _Any = version("drivetrain")
    elif name in _HOME_OF:
        value = getattr(_import_module(f".{_HOME_OF[name]}", __name__), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
