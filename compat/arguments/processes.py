"""The processes of a run, as other libraries ask about them: by accelerate's names.

accelerate itself is imported only by `partial_state`, for those who want its own object.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch

from ..enums import Word
from . import backend, fsdp
from .driver_session import session_of

__all__ = ["DistributedType", "Processes", "partial_state"]


class DistributedType(Word):
    """Kinds of distribution over processes; the values are accelerate's."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_XPU = "MULTI_XPU"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"


class Processes:
    """The process and its world, with the members of accelerate's `AcceleratorState`."""

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

    @property
    def local_process_index(self) -> int:
        """The rank of this process on its machine."""
        return int(self.args.local_process_index)

    @property
    def is_main_process(self) -> bool:
        """Whether this is the first of all."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first on this machine."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last of all."""
        return self.process_index == self.num_processes - 1

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
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
    def mixed_precision(self) -> str:
        """`no`, `fp16` or `bf16`."""
        return backend.mixed_precision(self.args)

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
    """accelerate's `PartialState` of the processes that `args` belong to, or our own object with
    the same members where accelerate is not installed.

    The process group is the driver's: it is brought up first, and accelerate adopts it.
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
        with _own_threads():
            return PartialState(cpu=args.device.type == "cpu")
    return PartialState()


@contextmanager
def _own_threads() -> Iterator[None]:
    """On the CPU accelerate changes the number of threads, unless this variable is set."""
    if "OMP_NUM_THREADS" in os.environ:
        yield
        return
    os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]
