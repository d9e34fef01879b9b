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
from .common import layouts
from .common.accelerators import facts_of, find
from .process_group.devices import choose_device, probe_devices
from .process_group.replicated import DdpEngine, ReplicatedOptions, promised
from .process_group.session import ProcessGroupSession, process_group

__all__ = ["driver"]

_TYPE = "xpu"
_INSTALL = "the XPU build of torch: https://docs.pytorch.org/docs/stable/notes/get_start_xpu.html"


class XpuDriver:
    """One process for each Intel GPU, all holding the whole model."""

    name = "xpu"
    options_type = ReplicatedOptions
    layout = staticmethod(layouts.replicated_layout)

    def probe(self) -> Probe:
        found, versions = find(), {"torch": torch.__version__}
        if found.type != _TYPE:
            return Probe(False, "this build of torch is not for Intel GPUs", _INSTALL, versions)
        if not dist.is_available() or not dist.is_backend_available(facts_of(_TYPE).collectives):
            return Probe(False, "this build of torch has no xccl", _INSTALL, versions)
        if not found.count:
            return Probe(False, "no Intel GPU is visible to its driver", "", versions)
        return probe_devices(19)  # `ddp` does the same here, and has more options

    def capabilities(self, plan: Plan) -> Capabilities:
        return promised(_TYPE)

    @contextmanager
    def open(self, plan: Plan) -> Iterator[ProcessGroupSession]:
        probe = self.probe()
        if not probe.usable:
            raise BackendUnavailable(f"backend {self.name!r} cannot run here: {probe.reason}")
        with process_group(plan, choose_device(_TYPE)) as world:
            yield ProcessGroupSession(plan, world, DdpEngine)


driver = XpuDriver()
