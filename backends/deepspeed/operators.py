"""DeepSpeed's operators, which are compiled when they are first needed."""

from __future__ import annotations

import os
import time
import warnings
from contextlib import suppress
from pathlib import Path

from ...kernel.errors import BackendUnavailable

__all__ = ["LONGEST_BUILD_SECONDS", "compile_file_operator", "refuse_stale_locks"]

LONGEST_BUILD_SECONDS = 900.0
"""A lock on a folder in which nothing has changed for that long is stale."""


def refuse_stale_locks() -> None:
    """Raises `BackendUnavailable` when a stale lock keeps DeepSpeed's operators from being
    compiled. A build that is killed leaves its lock, on which every later run would wait for ever.
    """
    from torch.utils import cpp_extension

    if not hasattr(cpp_extension, "FileBaton"):
        return  # later versions of torch use locks that the system frees when a process ends
    warned = False
    while locks := list(Path(os.environ["TORCH_EXTENSIONS_DIR"]).glob("*/lock")):
        with suppress(FileNotFoundError):  # done while we looked
            newest = max(path.stat().st_mtime for path in locks[0].parent.iterdir())
            if time.time() - newest > LONGEST_BUILD_SECONDS:
                raise BackendUnavailable(
                    f"a build of DeepSpeed's operators was killed and left its lock {locks[0]}, "
                    "for which every run waits. Delete that file, unless a build is running now"
                )
        if not warned:
            warnings.warn(f"waiting for the build that holds {locks[0]}", stacklevel=2)
        warned = True
        time.sleep(0.5)


def compile_file_operator() -> None:
    """Compile the operator that NVMe offload needs, once an environment: on the first rank, while
    the others wait. Raises `BackendUnavailable` where it cannot be compiled."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    refuse_stale_locks()
    builder = AsyncIOBuilder()
    if not builder.is_compatible():
        raise BackendUnavailable(
            "NVMe offload needs libaio with its headers, and a C++ compiler: install libaio-dev "
            "(libaio-devel where packages are RPMs), or name their folders in CPATH and "
            "LIBRARY_PATH; or offload to 'cpu'"
        )
    builder.load(verbose=False)
