"""Names of files and folders that other code expects, and a search for the last checkpoint."""

from __future__ import annotations

import os
import re
from pathlib import Path

__all__ = [
    "FSDP_MODEL_NAME",
    "OPTIMIZER_NAME",
    "OPTIMIZER_NAME_BIN",
    "PREFIX_CHECKPOINT_DIR",
    "RECORDS",
    "SCALER_NAME",
    "SCHEDULER_NAME",
    "TRAINER_STATE_NAME",
    "TRAINING_ARGS_NAME",
    "get_last_checkpoint",
]

PREFIX_CHECKPOINT_DIR = "checkpoint"
RECORDS = "records"
"""The folder of `run_records` in the output folder."""
TRAINER_STATE_NAME = "trainer_state.json"
TRAINING_ARGS_NAME = "training_args.json"
"""Here JSON; transformers pickles its arguments into `training_args.bin`."""

# Written by transformers, read when a run resumes from its folders.
OPTIMIZER_NAME = "optimizer.pt"
OPTIMIZER_NAME_BIN = "optimizer.bin"
SCHEDULER_NAME = "scheduler.pt"
SCALER_NAME = "scaler.pt"
FSDP_MODEL_NAME = "pytorch_model_fsdp"


def get_last_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """Return the path of the `checkpoint-N` folder in `folder` with the greatest N, or None."""
    numbered = [
        (int(match[1]), path)
        for path in Path(folder).iterdir()
        if (match := re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", path.name)) and path.is_dir()
    ]
    return os.path.join(folder, max(numbered)[1].name) if numbered else None
