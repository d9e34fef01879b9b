"""Parameters and optimizer states that are cut over ranks: `DTensor`s and their parts.

https://docs.pytorch.org/docs/stable/distributed.tensor.html
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..kernel.contract import Box, Kind, Piece, Reader
from . import _state

ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in (
        *("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam"),
        *("Adadelta", "Adagrad", "ASGD", "RMSprop"),
    )
)
"""Optimizers to which a tensor's elements are nothing but numbers: they may step a part of it.
torch's Rprop is not here: up to 2.8 at least it cannot write to a `DTensor` by index.
"""
FUSED = (torch.optim.Adam, torch.optim.AdamW)
"""Those whose fused kernels take `DTensor`s."""


def steps_parts(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it updates `DTensor`s rightly, each rank its part."""
    kind = type(optimizer)
    return kind in ELEMENTWISE and (kind in FUSED or not optimizer.defaults.get("fused"))


def is_cut(tensor: Tensor) -> bool:
    """Whether ranks hold different parts of it."""
    return (
        isinstance(tensor, DTensor)
        and tensor.numel() > 0
        and any(placement.is_shard() for placement in tensor.placements)
    )


def own_part(tensor: Tensor) -> Tensor:
    """What this rank holds, in place: the whole of a tensor that is not cut."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_box(tensor: DTensor) -> Box:
    """Where `own_part` lies."""
    mesh = tensor.device_mesh
    cuts = [
        (placement.dim, mesh.get_local_rank(axis), mesh.size(axis))  # type: ignore[attr-defined]
        for axis, placement in enumerate(tensor.placements)
        if placement.is_shard()
    ]
    return chunk_of(tuple(tensor.shape), cuts)


def chunk_of(shape: tuple[int, ...], cuts: Iterable[tuple[int, int, int]]) -> Box:
    """The part that is left after each cut: along a dimension, the n-th of so many chunks. Chunks
    are equal, the last ones less."""
    offsets, sizes = [0] * len(shape), list(shape)
    for dim, number, num_chunks in cuts:
        chunk = -(-sizes[dim] // num_chunks)
        start = min(chunk * number, sizes[dim])
        offsets[dim] += start
        sizes[dim] = min(chunk, sizes[dim] - start)
    return Box(tuple(offsets), tuple(sizes))


def cut_like(parameter: DTensor, part: Tensor) -> DTensor:
    """A tensor of the parameter's shape of which this rank holds `part`."""
    return DTensor.from_local(
        part.to(parameter.to_local().device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def take_own(whole: Tensor, parameter: DTensor) -> Tensor:
    """A new tensor: the part of `whole` that this rank holds of the parameter."""
    box = own_box(parameter)
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        whole = whole.narrow(dim, offset, size)
    return whole.clone()


def whole(tensor: Tensor, device: torch.device) -> Tensor:
    """All of it, on every rank; `device` is where ranks talk."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.to_local().device.type != device.type:
        tensor = DTensor.from_local(
            tensor.to_local().to(device),
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
    return tensor.full_tensor()


# --- saving and restoring -------------------------------------------------------------------


def pieces(state: Mapping[Kind, Mapping[str, Tensor]], rank: int, size: int) -> Iterator[Piece]:
    """What is cut: this rank's part, of which one replica in turn writes. All else: dealt out."""
    replicated: dict[Kind, dict[str, Tensor]] = {}
    for kind, tensors in state.items():
        for turn, (name, tensor) in enumerate(tensors.items()):
            if not is_cut(tensor):
                replicated.setdefault(kind, {})[name] = own_part(tensor)
                continue
            assert isinstance(tensor, DTensor)
            part = own_part(tensor)
            if part.numel() and _writes(tensor, turn):
                yield Piece(kind, name, part, tuple(tensor.shape), own_box(tensor))
    yield from _state.dealt_pieces(replicated, rank, size)


def _writes(tensor: DTensor, turn: int) -> bool:
    """Whether this rank is the replica whose turn it is."""
    replica, num_replicas = 0, 1
    for axis, placement in enumerate(tensor.placements):
        if not placement.is_shard():
            replica = replica * tensor.device_mesh.size(axis)
            replica += tensor.device_mesh.get_local_rank(axis)
            num_replicas *= tensor.device_mesh.size(axis)
    return replica == turn % num_replicas


def read_weight(reader: Reader, name: str, tensor: Tensor) -> Tensor:
    """What this rank holds of it, and no more."""
    if not is_cut(tensor):
        return reader.read("weights", name)
    assert isinstance(tensor, DTensor)
    return reader.read("weights", name, own_box(tensor))


def read_optimizer_entry(reader: Reader, name: str, parameter: Tensor) -> Tensor:
    """State of the parameter's shape is cut as the parameter is; any other is whole."""
    if not is_cut(parameter) or reader.info("optimizer", name).shape != tuple(parameter.shape):
        return reader.read("optimizer", name)
    assert isinstance(parameter, DTensor)
    return cut_like(parameter, reader.read("optimizer", name, own_box(parameter)))


# --- stepping on whole tensors --------------------------------------------------------------


class WholeStep:
    """Steps an optimizer to which a tensor is more than its elements, one whole tensor at a time.

    Adafactor's row and column moments (torch's own refuses cut tensors, or is silently wrong on
    them: 2.8) and Muon's orthogonal momentum need all of a matrix. Every rank gathers a weight,
    its gradient and its state, makes the same update, and keeps its part: an update costs the
    traffic of a gather of each, and the memory of one tensor. State of another shape than the
    weight's stays whole. For optimizers that keep their state by parameter, as torch's do.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.optimizer, self.device = optimizer, device

    def step(self) -> None:
        """As the optimizer's own."""
        groups = self.optimizer.param_groups
        try:
            for group in groups:
                self.optimizer.param_groups = [group]
                parameters = group["params"]
                try:
                    for parameter in parameters:
                        if parameter.grad is not None:
                            self._step_one(group, parameter)
                finally:
                    group["params"] = parameters
        finally:
            self.optimizer.param_groups = groups

    def _step_one(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        assert isinstance(parameter, DTensor) and parameter.grad is not None
        states, home = self.optimizer.state, parameter.to_local().device
        stand_in = nn.Parameter(whole(parameter, self.device).to(home))
        stand_in.grad = whole(parameter.grad, self.device).to(home)
        if parameter in states:
            states[stand_in] = {
                key: whole(value, self.device).to(home) if isinstance(value, DTensor) else value
                for key, value in states.pop(parameter).items()
            }
        group["params"] = [stand_in]
        self.optimizer.step()
        with torch.no_grad():
            own_part(parameter).copy_(take_own(stand_in.detach(), parameter))
        if stand_in in states:
            states[parameter] = {
                key: cut_like(parameter, take_own(value, parameter))
                if isinstance(value, Tensor) and value.shape == parameter.shape and value.dim()
                else value
                for key, value in states.pop(stand_in).items()
            }
