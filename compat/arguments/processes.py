"""The processes of a run, under accelerate's names, for other libraries.

accelerate itself is imported only by `partial_state`, which returns accelerate's own object.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch

from ..enums import StringEnum
from . import backend, fsdp
from .driver_session import session_of

__all__ = ["DistributedType", "Processes", "partial_state", "start_library_state"]


Call = Callable[..., Any]


class DistributedType(StringEnum):
    """Kinds of distribution over processes; the values are accelerate's."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_XPU = "MULTI_XPU"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"


class Processes:
    """This process and its world, with the members of accelerate's `AcceleratorState`."""

    def __init__(self, args: Any) -> None:
        self.args = args

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        device: torch.device = self.args.device
        return device

    @property
    def num_processes(self) -> int:
        """Number of processes."""
        return int(self.args.world_size)

    @property
    def process_index(self) -> int:
        """The rank of this process."""
        return int(self.args.process_index)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"accelerator.state has no {name!r}: it reads the arguments and the driver, and holds "
            "nothing itself. See docs/from-hf-trainer.md"
        )

    @property
    def local_process_index(self) -> int:
        """The rank of this process on its machine."""
        return int(self.args.local_process_index)

    @property
    def is_main_process(self) -> bool:
        """True if this is the first of all."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """True if this is the first on this machine."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """True if this is the last of all."""
        return self.process_index == self.num_processes - 1

    @property
    def use_distributed(self) -> bool:
        """True if there is more than one process."""
        return self.num_processes > 1

    @property
    def distributed_type(self) -> DistributedType:
        """The kind of distribution over processes."""
        driver = backend.chosen(self.args).driver
        if driver == "xla":
            return DistributedType.XLA
        if driver in ("deepspeed", "fsdp"):
            return DistributedType(driver.upper())
        if not self.use_distributed:
            return DistributedType.NO
        kinds = {"cuda": DistributedType.MULTI_GPU, "xpu": DistributedType.MULTI_XPU}
        return kinds.get(self.device.type, DistributedType.MULTI_CPU)

    @property
    def multi_device(self) -> bool:
        """True if each of several processes has an accelerator, with a replica of the model."""
        kinds = (DistributedType.MULTI_GPU, DistributedType.MULTI_XPU)
        return self.use_distributed and self.distributed_type in kinds

    @property
    def is_fsdp2(self) -> bool:
        """True if FSDP shards the model; there is no other version of it here."""
        return self.fsdp_plugin is not None

    def on_main_process(self, function: Call) -> Call:
        """Wrap a function so that only the first process of all runs it; the others get None."""
        return self._only(function, lambda: self.is_main_process)

    def on_local_main_process(self, function: Call) -> Call:
        """Wrap a function so that only the first process of each machine runs it."""
        return self._only(function, lambda: self.is_local_main_process)

    def on_last_process(self, function: Call) -> Call:
        """Wrap a function so that only the last process runs it."""
        return self._only(function, lambda: self.is_last_process)

    def on_process(self, function: Call | None = None, process_index: int | None = None) -> Any:
        """Wrap a function so that only one process runs it; also as
        `@on_process(process_index=2)`.
        """
        if function is None:
            return functools.partial(self.on_process, process_index=process_index)
        return self._only(function, lambda: self.process_index == process_index)

    def on_local_process(
        self, function: Call | None = None, local_process_index: int | None = None
    ) -> Any:
        """Wrap a function so that only one process of each machine runs it."""
        if function is None:
            return functools.partial(self.on_local_process, local_process_index=local_process_index)
        return self._only(function, lambda: self.local_process_index == local_process_index)

    def _only(self, function: Call, is_it: Callable[[], bool]) -> Call:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if is_it() else None

        return call

    @property
    def mixed_precision(self) -> str:
        """`no`, `fp16`, `bf16` or `fp8`."""
        return backend.mixed_precision(self.args)

    @property
    def parallelism_config(self) -> Any:
        """The parallelism configuration as given."""
        return getattr(self.args, "parallelism_config", None)

    @property
    def deepspeed_plugin(self) -> Any:
        """DeepSpeed's configuration; None on other drivers."""
        if backend.chosen(self.args).driver != "deepspeed":
            return None
        return backend.deepspeed_facts(self.args)

    @property
    def fsdp_plugin(self) -> Any:
        """FSDP's configuration; None on other drivers."""
        choice = backend.chosen(self.args)
        return fsdp.FsdpFacts(choice.options) if choice.driver == "fsdp" else None


def partial_state(args: Any) -> Any:
    """Return accelerate's `PartialState` of the processes of `args`, or an own object with the same
    members if accelerate is not installed.

    The driver's process group is opened first, and accelerate adopts it.
    """
    if find_spec("accelerate") is None:
        return Processes(args)
    from accelerate import PartialState

    state = PartialState._shared_state
    if state and state.get("num_processes") != args.world_size:
        PartialState._reset_state()
    if not PartialState._shared_state:
        if args.world_size > 1:
            session_of(args).session  # noqa: B018  # brings the group up
        with _thread_count_kept(), _launcher_environment_kept():
            return PartialState(cpu=args.device.type == "cpu")
    return PartialState()


def start_library_state(args: Any) -> None:
    """Start accelerate's `PartialState` with the arguments, as HF's arguments do: accelerate's
    loggers need it. If accelerate is not loaded, or for several processes, whose process group this
    opens, it is started only for argument classes of other libraries, whose Trainers log before
    they are built.
    """
    module = type(args).__module__
    foreign = not module.startswith("drivetrain.") and module != "__main__"
    loaded = "accelerate" in sys.modules and args.world_size == 1
    if (foreign or loaded) and find_spec("accelerate") is not None:
        partial_state(args)


@contextmanager
def _launcher_environment_kept() -> Iterator[None]:
    """Hide a lone LOCAL_RANK from accelerate in the block. DeepSpeed needs this variable in a
    single process, too, but accelerate would take it for a launch, add RANK and WORLD_SIZE to the
    environment, and wait for a process group."""
    if "WORLD_SIZE" in os.environ or "LOCAL_RANK" not in os.environ:
        yield
        return
    local_rank = os.environ.pop("LOCAL_RANK")
    try:
        yield
    finally:
        os.environ["LOCAL_RANK"] = local_rank


@contextmanager
def _thread_count_kept() -> Iterator[None]:
    """Set the variable that keeps accelerate from changing the number of CPU threads."""
    if "OMP_NUM_THREADS" in os.environ:
        yield
        return
    os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]
