"""The processes of a run, as other libraries ask about them: by accelerate's names.

accelerate itself is imported only by `partial_state`, for those who want its own object.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch

from ..enums import Word
from . import backend, fsdp
from .driver_session import session_of

__all__ = ["DistributedType", "Processes", "partial_state"]


Call = Callable[..., Any]


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
        """True if FSDP cuts the model; there is no other version of it here."""
        return self.fsdp_plugin is not None

    def on_main_process(self, function: Call) -> Call:
        """A decorator: the first process of all calls it, the others get None."""
        return self._only(function, lambda: self.is_main_process)

    def on_local_main_process(self, function: Call) -> Call:
        """Likewise the first process of each machine."""
        return self._only(function, lambda: self.is_local_main_process)

    def on_last_process(self, function: Call) -> Call:
        """Likewise the last of all."""
        return self._only(function, lambda: self.is_last_process)

    def on_process(self, function: Call | None = None, process_index: int | None = None) -> Any:
        """Likewise one of them, also as `@on_process(process_index=2)`."""
        if function is None:
            return functools.partial(self.on_process, process_index=process_index)
        return self._only(function, lambda: self.process_index == process_index)

    def on_local_process(
        self, function: Call | None = None, local_process_index: int | None = None
    ) -> Any:
        """Likewise one of each machine."""
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
        """As given."""
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
