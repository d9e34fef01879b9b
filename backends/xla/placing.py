"""The xla driver's use of torch_xla: where tensors lie, when recorded work is run, and replacements
of the parts of torch that do not reach this device."""

from __future__ import annotations

import glob
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...data.nested import map_tensors, tensors_of
from ...data.private_names import private_name
from ...kernel.errors import BackendUnavailable, SettingError
from ...kernel.shards import Box, Piece
from ..common import attached
from ..common.buffers import write_unseen
from ..common.update_random import Source

_INSTANCE_NORMS: Any = private_name(
    "torch.nn.modules.instancenorm",
    "_InstanceNorm",
    (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
"""Layers that normalise each sample by itself, and classes derived from them."""
_NORMS: Any = private_name(
    "torch.nn.modules.batchnorm",
    "_NormBase",
    (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, _INSTANCE_NORMS),
)
"""Layers with running variances, and classes derived from them."""


def default_platform() -> str:
    """PJRT's name of the device type, when none is asked for."""
    return os.environ.get("PJRT_DEVICE") or ("TPU" if glob.glob("/dev/accel*") else "CPU")


def start(platform: str | None, devices: int | None, spmd: bool | None) -> Placement:
    """Bring the runtime up, which happens once in a process. Raises `SettingError` when it runs
    otherwise than asked for, and `BackendUnavailable` when it comes too late.
    """
    os.environ.setdefault("PJRT_DEVICE", default_platform())
    import torch_xla
    from torch_xla import runtime

    if not torch_xla._XLAC._xla_runtime_is_initialized():
        os.environ["PJRT_DEVICE"] = platform or default_platform()
        if devices is not None:
            os.environ["CPU_NUM_DEVICES"] = str(devices)
    # else 0.0 and 1.0 become part of a program, and a learning rate of 0 compiles another one
    torch_xla._XLAC._set_xla_handle_special_scalars(False)
    seen = torch_xla.real_devices()
    spread = len(seen) > 1 if spmd is None else spmd
    fixed = runtime.is_spmd() or torch_xla._XLAC._xla_get_spmd_config_is_locked()
    for name, asked, found in (
        ("platform", platform, seen[0].partition(":")[0]),
        ("devices", devices, len(seen)),
        ("spmd", spread, runtime.is_spmd() if fixed else spread),
    ):
        if asked not in (None, found):
            raise SettingError(
                f"backend.{name} is {asked}, and XLA runs with {found} in this process. It is "
                "fixed when XLA starts: leave the option out, or start another process"
            )
    if spread and not runtime.is_spmd():
        runtime.use_spmd()
    device = torch_xla.device()
    try:
        torch.zeros((), device=device, requires_grad=True).backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:  # autograd makes its queues once, for the devices that it knows
        raise BackendUnavailable(
            "this process ran a backward before torch_xla was imported, which autograd does not "
            "survive; import torch_xla first, or start another process"
        ) from error
    return Placement(device, len(seen) if spread else 1)


class Placement:
    """Places tensors: whole on the one device, or sharded over the mesh of all devices."""

    def __init__(self, device: torch.device, num_devices: int) -> None:
        self.device, self.num_devices = device, num_devices
        self._specs: dict[tuple[int, int], Any] = {}
        if num_devices > 1:
            import numpy
            from torch_xla.distributed import spmd

            self._spmd = spmd
            self._mesh = spmd.Mesh(numpy.arange(num_devices), (num_devices,), ("fsdp",))

    def sharded_dim(self, tensor: Tensor) -> int | None:
        """The dimension along which a parameter is sharded: the largest that is divisible, else the
        largest; None keeps it whole on every device.
        """
        sizes, count = tensor.shape, self.num_devices
        if count == 1 or tensor.numel() == 0 or max(sizes, default=0) < count:
            return None
        return max(range(len(sizes)), key=lambda dim: (sizes[dim] % count == 0, sizes[dim], -dim))

    def batch_dim(self, tensor: Tensor) -> int | None:
        """Batches are split along their first dimension."""
        return 0 if self.num_devices > 1 and tensor.dim() else None

    def put(self, tensor: Tensor, dim: int | None) -> Tensor:
        """Return the tensor on the device, sharded along `dim`. Of a tensor on the host, no device
        ever holds more than its shard.
        """
        import torch_xla.core.xla_model as xm

        if dim is None:
            return tensor.to(self.device)
        if (tensor.dim(), dim) not in self._specs:
            axes = tuple("fsdp" if d == dim else None for d in range(tensor.dim()))
            self._specs[tensor.dim(), dim] = self._spmd.ShardingSpec(self._mesh, axes)
        sent = xm.send_cpu_data_to_device(
            [tensor.cpu()], self.device, self._specs[tensor.dim(), dim]
        )
        return cast(Tensor, sent[0])

    def keep(self, tensor: Tensor, dim: int | None) -> None:
        """Shard a result along `dim`; otherwise the compiler may keep it whole."""
        if dim is not None:
            axes = tuple("fsdp" if d == dim else None for d in range(tensor.dim()))
            self._spmd.mark_sharding(tensor, self._mesh, axes)

    def is_sharded(self, tensor: Tensor) -> bool:
        """Return True if a tensor on the device is sharded."""
        import torch_xla

        spec = torch_xla._XLAC._get_xla_sharding_spec(tensor) if self.num_devices > 1 else ""
        return "devices=" in spec

    def parts(self, tensor: Tensor) -> list[tuple[Box, Tensor]]:
        """The parts of a sharded tensor, on the host."""
        from torch_xla.distributed.spmd import XLAShardedTensor

        whole = [slice(0, size) for size in tensor.shape]
        found = []
        for shard in XLAShardedTensor(tensor).local_shards:
            part = shard.unpadded_data
            if shard.replica_id or not part.numel():  # the compiler may keep copies of a part
                continue
            slices = whole if shard.indices is Ellipsis else shard.indices
            start, size = (s.start for s in slices), (s.stop - s.start for s in slices)
            found.append((Box(tuple(start), tuple(size)), part))
        return found


def random_source() -> Source:
    """Return the generator of this device."""
    import torch_xla.core.xla_model as xm

    return Source(xm.get_rng_state, xm.set_rng_state, xm.set_rng_state)


def cut_graph() -> None:
    """Run what was recorded. The random state is as it was: it moves with what is drawn alone, so
    that a save or an evaluation more does not change the training.
    """
    import torch_xla
    import torch_xla.core.xla_model as xm

    state = xm.get_rng_state()
    torch_xla.sync()
    xm.set_rng_state(state)


def move(module: nn.Module, placement: Placement) -> None:
    """Parameters and buffers to their places. `Module.to` would untie what is tied, since a
    parameter cannot change to this device in place.
    """
    moved: dict[int, Tensor] = {}
    for part in module.modules():
        for name, tensor in [*part._parameters.items(), *part._buffers.items()]:
            if tensor is None:
                continue
            if id(tensor) not in moved:
                is_parameter = isinstance(tensor, nn.Parameter)
                dim = placement.sharded_dim(tensor) if is_parameter else None
                new = placement.put(tensor.detach(), dim)
                if is_parameter:
                    new = attached.in_place_of(tensor, new)
                    attached.carry_hooks(tensor, new)
                moved[id(tensor)] = new
            setattr(part, name, moved[id(tensor)])


def count_variances_as_torch(module: nn.Module) -> None:
    """torch_xla 2.8 adds the variance of a batch of n to a running one as it is, torch by n/(n-1)
    of it, as a guess at the variance of all."""
    for part in module.modules():
        if isinstance(part, _NORMS) and part.running_var is not None:
            before = _RunningVariance(part)
            part.register_forward_pre_hook(before.note)
            part.register_forward_hook(before.correct)


class _RunningVariance:
    """The running variance of one layer before a forward."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.old: Tensor | None = None

    def note(self, layer: nn.Module, args: Any) -> None:
        running = self.layer.running_var
        self.old = running.clone() if self.layer.training and running is not None else None

    def correct(self, layer: nn.Module, args: Any, output: Tensor) -> None:
        new, old, self.old = self.layer.running_var, self.old, None
        if old is None or new is None:
            return
        share, count = self.layer.momentum, self.layer.num_batches_tracked
        if share is None and count is not None:
            kept = old * (1 - 1 / count)  # the mean over all batches
        else:
            kept = old * (1 - (share or 0.0))
        number = _elements_of_one_variance(self.layer, output)
        write_unseen([new], [kept + (new - kept) * (number / max(number - 1, 1))])


def _elements_of_one_variance(layer: Any, output: Tensor) -> int:
    if isinstance(layer, _INSTANCE_NORMS):  # one for each sample
        sizes: tuple[int, ...] = tuple(output.shape[1 - layer._get_no_batch_dim() :])
        return math.prod(sizes)
    num_features: int = layer.num_features
    return output.numel() // max(num_features, 1)


def fetch(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces on the host, all in one transfer."""
    import torch_xla

    tensors = torch_xla._XLAC._xla_get_cpu_tensors([piece.tensor for piece in pieces])
    return [replace(piece, tensor=host) for piece, host in zip(pieces, tensors, strict=True)]


def recompute(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Activation checkpointing with the random state of this device, which torch does not know,
    and a barrier, without which the compiler merges the second forward with the first.
    """
    import torch_xla.core.xla_model as xm
    from torch.utils.checkpoint import checkpoint

    if not hasattr(torch, "xla"):  # until torch_xla registers itself; `checkpoint` needs it
        torch._register_device_module("xla", xm)
    again = False
    state = xm.get_rng_state()

    @contextmanager
    def second() -> Iterator[None]:
        nonlocal again
        now, again = xm.get_rng_state(), True
        xm.set_rng_state(state)
        try:
            yield
        finally:  # torch leaves by an exception once it has what it needs
            xm.set_rng_state(now)

    def run(*args: Any, **kwargs: Any) -> Any:
        if again:
            args, kwargs = map_tensors(Tensor.clone, (args, kwargs))
            xm.optimization_barrier_(list(tensors_of((args, kwargs))))
        return forward(*args, **kwargs)

    return checkpoint(
        run,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=lambda: (nullcontext(), second()),
        **kwargs,
    )


class ConditionalUpdate:
    """An update that the device applies or drops; the host learns later which.

    The new values are recorded, and then the choice between them and the old ones, which the
    compiler makes part of the same loop over each tensor. What the optimizer keeps on the host (a
    count of steps), or in its groups, is put back when the answer is fetched.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, norm: Tensor) -> None:
        self.optimizer, self.finite = optimizer, torch.isfinite(norm)
        self._weights = [
            (parameter, parameter.detach().clone())
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        self._before = {
            parameter: {
                key: value.clone() if isinstance(value, Tensor) else value
                for key, value in entries.items()
            }
            for parameter, entries in optimizer.state.items()
        }
        self._groups = [
            {
                key: value.clone() if isinstance(value, Tensor) else value
                for key, value in group.items()
                if key not in ("params", "lr")
            }
            for group in optimizer.param_groups
        ]
        self._answer: bool | None = None

    @torch.no_grad()
    def choose(self) -> None:
        """Choose between new and old values. Called right after the optimizer's step."""
        for parameter, old in self._weights:
            parameter.copy_(torch.where(self.finite, parameter, old))
        self._weights.clear()
        for parameter, entries in self._before.items():
            now = self.optimizer.state[parameter]
            for key, old in entries.items():
                if isinstance(old, Tensor) and old.device == self.finite.device:
                    now[key].copy_(torch.where(self.finite, now[key], old))
                    entries[key] = now[key]

    def applied(self) -> bool:
        """Return True if the update was applied; waits for this update alone."""
        if self._answer is None:
            self._answer = bool(self.finite)
            if not self._answer:
                self.optimizer.state.clear()
                self.optimizer.state.update(self._before)
                for group, before in zip(self.optimizer.param_groups, self._groups, strict=True):
                    group.update(before)
            self._before, self._groups = {}, []
        return self._answer
