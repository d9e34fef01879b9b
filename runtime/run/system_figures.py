"""Figures of the system that a log adds: memory and processor load of the process, and memory of
its device."""

from __future__ import annotations

import os
import resource
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

__all__ = ["SystemFigures"]

_STATM = Path("/proc/self/statm")
_BYTES_OF_PEAK = 1 if sys.platform == "darwin" else 1024


class SystemFigures:
    """Reads the resources that this process uses; figures that the system does not provide are left
    out."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: Any = None
        """The torch module that counts the device's memory."""
        with suppress(RuntimeError):  # a device without a module of its own
            module = torch.get_device_module(device)
            if hasattr(module, "max_memory_allocated"):
                self._memory = module
        self._at, self._used = time.perf_counter(), time.process_time()
        self._peak = 0.0

    def now(self) -> dict[str, float]:
        """Return the present figures; the load is the mean number of cores since the last call.
        Does not wait for the device."""
        found: dict[str, float] = {}
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _BYTES_OF_PEAK
        with suppress(OSError, ValueError, IndexError):  # only Linux has it
            pages = int(_STATM.read_text().split()[1])
            found["process_bytes"] = pages * os.sysconf("SC_PAGE_SIZE")
        # Linux counts the peak less often than the memory in use
        self._peak = max(self._peak, peak, found.get("process_bytes", 0.0))
        found["process_peak_bytes"] = self._peak
        at, used = time.perf_counter(), time.process_time()
        if at > self._at:
            found["processor_cores"] = (used - self._used) / (at - self._at)
        self._at, self._used = at, used
        if self._memory is not None:
            found["device_bytes"] = self._memory.memory_allocated(self._device)
            found["device_peak_bytes"] = self._memory.max_memory_allocated(self._device)
        return found
