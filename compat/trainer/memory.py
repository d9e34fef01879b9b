"""The memory of each phase of a Trainer, on the host and on the accelerator."""

from __future__ import annotations

import gc
import importlib.util
import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["TrainerMemoryTracker"]

_STAGES = {
    "__init__": "init",
    "train": "train",
    "_inner_training_loop": "train",
    "_finalize_training": "train",
    "evaluate": "eval",
    "predict": "test",
}
"""The method that calls the tracker, and the prefix of its metrics."""

_SAMPLE_SECONDS = 0.002


@dataclass
class _Use:
    """Bytes at the beginning and end of a stage, and the most in between."""

    begin: int
    end: int = 0
    peak: int = 0

    def deltas(self) -> dict[str, int]:
        """`alloc`: kept at the end. `peaked`: needed beyond that for a while."""
        return {"alloc": self.end - self.begin, "peaked": max(0, self.peak - self.end)}


class TrainerMemoryTracker:
    """Adds `<stage>_mem_cpu_alloc_delta`, `<stage>_mem_cpu_peaked_delta` and the same for `gpu`,
    in bytes, to the metrics of a stage (init, train, eval, test).

    The host's figure is the resident memory of the process, sampled; psutil must be installed
    (ImportError otherwise). The accelerator's is what torch allocated on the current device.
    The stage is known by the method that calls, or is named. A stage inside another is part of
    it. What the construction took is told with the first stage that reports.
    """

    stages = _STAGES

    def __init__(self, skip_memory_metrics: bool = False) -> None:
        self.skip_memory_metrics = skip_memory_metrics
        if skip_memory_metrics:
            return
        if importlib.util.find_spec("psutil") is None:
            raise ImportError("skip_memory_metrics=False measures by psutil: pip install psutil")
        import psutil

        self._process = psutil.Process()
        self._device = _device_memory()
        self._stage: str | None = None
        self._uses: dict[str, dict[str, _Use]] = {}
        self._running: dict[str, _Use] = {}
        self._sampler: _PeakSampler | None = None
        self._init_reported = False

    def start(self, stage: str | None = None) -> None:
        """Begin to measure. `stage`: init, train, eval or test; by default the caller's.

        Raises ValueError when the calling method has no stage.
        """
        if self.skip_memory_metrics:
            return
        stage = stage or _stage_of_caller()
        if self._stage not in (None, stage):
            return
        if self._sampler is not None:  # started anew, as by a retry with smaller batches
            self._sampler.finish()
        self._stage = stage
        gc.collect()
        self._running = {"cpu": _Use(self._resident())}
        if self._device is not None:
            self._device.empty_cache()
            self._device.reset_peak_memory_stats()
            self._running["gpu"] = _Use(self._device.memory_allocated())
        self._sampler = _PeakSampler(self._resident)

    def stop_and_update_metrics(
        self, metrics: dict[str, Any] | None = None, stage: str | None = None
    ) -> None:
        """End the measurement and add its figures to `metrics`, in place, where given."""
        if self.skip_memory_metrics:
            return
        stage = stage or _stage_of_caller()
        if self._stage != stage or self._sampler is None:
            return
        gc.collect()
        self._running["cpu"].end = self._resident()
        self._running["cpu"].peak = self._sampler.finish()
        if self._device is not None:
            self._running["gpu"].end = self._device.memory_allocated()
            self._running["gpu"].peak = self._device.max_memory_allocated()
        self._uses[stage] = self._running
        self._stage = self._sampler = None
        if metrics is not None:
            self._report(stage, metrics)

    def _report(self, stage: str, metrics: dict[str, Any]) -> None:
        init = self._uses.get("init", {}) if not self._init_reported else {}
        self._init_reported = True
        for name, uses in (("init", init), (stage, self._uses[stage])):
            for place, use in uses.items():
                for what, size in use.deltas().items():
                    metrics[f"{name}_mem_{place}_{what}_delta"] = size
        for place, use in init.items():
            metrics[f"before_init_mem_{place}"] = use.begin

    def _resident(self) -> int:
        return int(self._process.memory_info().rss)


class _PeakSampler:
    """Watches a figure from a thread until it is finished."""

    def __init__(self, measure: Callable[[], int]) -> None:
        self._measure = measure
        self._peak = measure()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(_SAMPLE_SECONDS):
            self._peak = max(self._peak, self._measure())

    def finish(self) -> int:
        """The greatest figure seen."""
        self._over.set()
        self._thread.join()
        return max(self._peak, self._measure())


def _device_memory() -> Any:
    """torch's module for the accelerator of this machine if it counts memory, else None."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    module = getattr(torch, accelerator.type, None) if accelerator is not None else None
    return module if hasattr(module, "max_memory_allocated") else None


def _stage_of_caller() -> str:
    """Two frames up: the method that called the tracker."""
    frame = inspect.stack(context=0)[2]
    if frame.function not in _STAGES:
        raise ValueError(
            f"memory is measured in {', '.join(_STAGES)}, not in {frame.function}; name the stage"
        )
    return _STAGES[frame.function]
