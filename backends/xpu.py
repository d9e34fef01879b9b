"""Intel GPUs on stock PyTorch: DistributedDataParallel over xccl, in one process or many.

It is for the GPUs that the ipex driver does not use: upstream moved that support into PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ..kernel.errors import BackendUnavailable
from ..kernel.plan import Capabilities, Plan, Probe
from ..launched import local_rank
from .common import layouts
from .process_group.replicated import SAVES_MEMORY, DdpEngine, ReplicatedOptions
from .process_group.session import ProcessGroupSession, process_group

__all__ = ["driver"]

_INSTALL = "the XPU build of torch: https://docs.pytorch.org/docs/stable/notes/get_start_xpu.html"


class XpuDriver:
    """One process for each Intel GPU, all holding the whole model."""

    name = "xpu"
    options_type = ReplicatedOptions
    layout = staticmethod(layouts.replicated_layout)

    def probe(self) -> Probe:
        versions = {"torch": torch.__version__}
        if not torch.xpu._is_compiled():
            return Probe(False, "this build of torch is not for Intel GPUs", _INSTALL, versions)
        if not dist.is_available() or not dist.is_xccl_available():
            return Probe(False, "this build of torch has no xccl", _INSTALL, versions)
        gpus = [torch.xpu.get_device_properties(i) for i in range(torch.xpu.device_count())]
        if not gpus:
            return Probe(False, "no Intel GPU is visible to its driver", "", versions)
        return Probe(
            usable=True,
            reason=f"xccl on {len(gpus)} Intel GPUs",
            versions=versions,
            devices=tuple(gpu.name for gpu in gpus),
            memory_bytes=sum(gpu.total_memory for gpu in gpus),
            preference=20,
        )

    def capabilities(self, plan: Plan) -> Capabilities:
        return Capabilities(
            precisions=frozenset({"fp32", "bf16", "fp16"}),
            multi_process=True,
            timeout_seconds=True,
            stall_seconds=True,
            sharded=False,
            compile=True,
            activation_checkpointing=True,
            max_grad_value=True,
            feeds_ahead=True,
            saves_memory=SAVES_MEMORY,
        )

    @contextmanager
    def open(self, plan: Plan) -> Iterator[ProcessGroupSession]:
        probe = self.probe()
        if not probe.usable:
            raise BackendUnavailable(f"backend 'xpu' cannot run here: {probe.reason}")
        if local_rank() >= len(probe.devices):
            raise BackendUnavailable(
                f"local rank {local_rank()} has no GPU: this machine shows {len(probe.devices)}. "
                "Start at most that many processes here"
            )
        device = torch.device("xpu", local_rank())
        torch.xpu.set_device(device)
        with process_group(plan, device) as world:
            yield ProcessGroupSession(plan, world, DdpEngine)


driver = XpuDriver()
