"""Checkpoints: files of tensor pieces, and a manifest that commits them.

`CheckpointStore` saves, `newest` and `list_checkpoints` find, `CheckpointReader` reads any region
of any tensor of a checkpoint of any driver, `export_weights` and `import_weights` exchange weights
with other libraries, `average_weights` makes a checkpoint of several. No pickle is written or read.
"""

from __future__ import annotations

from .catalog import (
    CHECKPOINTS,
    Best,
    Found,
    Listing,
    Rejected,
    best_of,
    checkpoint_path,
    checkpoints_of,
    is_checkpoint,
    list_checkpoints,
    named,
    newest,
)
from .export import export_weights, import_weights
from .manifest import FileEntry, Manifest, read_manifest
from .mean import average_weights
from .random_state import load_rng, own_random_state
from .reader import CheckpointReader, WithoutOptimizer
from .storage.protocol import MANIFEST, OpenFile, Storage, read_small, storage_of
from .store import BackgroundSave, CheckpointStore, save_folder

__all__ = [
    "CHECKPOINTS",
    "MANIFEST",
    "BackgroundSave",
    "Best",
    "CheckpointReader",
    "CheckpointStore",
    "FileEntry",
    "Found",
    "Listing",
    "Manifest",
    "OpenFile",
    "Rejected",
    "Storage",
    "WithoutOptimizer",
    "average_weights",
    "best_of",
    "checkpoint_path",
    "checkpoints_of",
    "export_weights",
    "import_weights",
    "is_checkpoint",
    "list_checkpoints",
    "load_rng",
    "named",
    "newest",
    "own_random_state",
    "read_manifest",
    "read_small",
    "save_folder",
    "storage_of",
]
