"""Properties of the arguments: rank, device, and values derived from several arguments.

They read the launcher's environment until a Trainer has a `DriverSession`, and the session
afterwards.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from ..enums import ParallelMode
from . import backend
from .driver_session import DriverSession, session_of
from .launcher import launched
from .processes import partial_state, start_library_state
from .resolve import log_verbosity
from .validate import LOG_LEVELS

__all__ = ["DerivedValues"]

_LOG = logging.getLogger(__name__)


class DerivedValues:
    """Properties and methods that code written for HF expects of arguments."""

    _driver_session: DriverSession | None = None
    """The session in which this process trains; set by the Trainer."""

    ddp_timeout: int
    log_level: str
    log_level_replica: str
    log_on_each_node: bool
    per_device_eval_batch_size: int
    per_device_train_batch_size: int
    save_on_each_node: bool
    warmup_steps: float

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy, without the session."""
        return {name: value for name, value in vars(self).items() if name != "_driver_session"}

    def _start_library_state(self) -> None:
        """Called when all fields have their values."""
        start_library_state(self)

    # --- which process this is

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self._driver_session.world.size if self._driver_session else launched().size

    @property
    def process_index(self) -> int:
        """The rank of this process."""
        return self._driver_session.world.rank if self._driver_session else launched().rank

    @property
    def local_process_index(self) -> int:
        """The rank of this process on its machine."""
        return launched().local_rank

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        if self._driver_session is not None:
            return self._driver_session.world.device
        expected = backend.expected_device(self)
        return session_of(self).world.device if expected is None else expected

    @property
    def _setup_devices(self) -> torch.device:
        return self.device

    @property
    def n_gpu(self) -> int:
        """1 where this process computes on a GPU, otherwise 0; `_n_gpu` may be set to something
        else. One process never spreads over several GPUs here: start one for each.
        """
        chosen = vars(self).get("_n_gpu")
        return int(self.device.type in ("cuda", "xpu")) if chosen is None else int(chosen)

    @property
    def parallel_mode(self) -> ParallelMode:
        """The kind of parallelism over devices."""
        if backend.chosen(self).driver == "xla":
            return ParallelMode.TPU
        if self.world_size > 1:
            return ParallelMode.DISTRIBUTED
        return ParallelMode.NOT_DISTRIBUTED if self.n_gpu > 1 else ParallelMode.NOT_PARALLEL

    @property
    def distributed_state(self) -> Any:
        """accelerate's `PartialState` of these processes where accelerate is installed, otherwise
        an object with those members of it that describe processes.
        """
        return partial_state(self)

    @property
    def should_log(self) -> bool:
        """True if this process logs: one process per machine, or one in all."""
        index = self.local_process_index if self.log_on_each_node else self.process_index
        return index == 0

    @property
    def should_save(self) -> bool:
        """True if this process writes models: one process in all, or one per machine."""
        index = self.local_process_index if self.save_on_each_node else self.process_index
        return index == 0

    @contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Run the block in the main process first (of each machine with `local`, otherwise of all),
        then in the others. `desc` names the work in log messages.
        """
        if self.world_size == 1:
            yield
            return
        meet = session_of(self).session.exchange
        is_main = (self.local_process_index if local else self.process_index) == 0
        try:
            if not is_main:
                _LOG.debug("process %d waits for %s", self.process_index, desc)
                meet(desc)
            yield
        finally:
            if is_main:
                _LOG.debug("process %d has done %s", self.process_index, desc)
                meet(desc)

    # --- what follows from several arguments

    @property
    def train_batch_size(self) -> int:
        """Samples in one forward of this process in training."""
        return self.per_device_train_batch_size * max(1, self.n_gpu)

    @property
    def eval_batch_size(self) -> int:
        """Samples in one forward of this process in evaluation."""
        return self.per_device_eval_batch_size * max(1, self.n_gpu)

    @property
    def ddp_timeout_delta(self) -> timedelta:
        """`ddp_timeout` as a span of time."""
        return timedelta(seconds=self.ddp_timeout)

    @property
    def place_model_on_device(self) -> bool | None:
        """None: the Trainer decides. Subclasses may return True or False."""
        return None

    @property
    def _no_sync_in_gradient_accumulation(self) -> bool:
        return backend.chosen(self).driver != "deepspeed"

    def get_process_log_level(self) -> int:
        """Return the level of `logging` for this process; passive keeps the library's level."""
        name = self.log_level if self.should_log else self.log_level_replica
        level = LOG_LEVELS[name]
        return log_verbosity() if level == -1 else level

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Return the number of warm-up updates; `warmup_steps` below 1 is a share of all
        updates."""
        if self.warmup_steps >= 1:
            return int(self.warmup_steps)
        return math.ceil(num_training_steps * self.warmup_steps)
