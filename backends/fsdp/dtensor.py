"""Parameters and optimizer states that are sharded over ranks: `DTensor`s and their parts.

https://docs.pytorch.org/docs/stable/distributed.tensor.html
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from ...data.nested import map_leaves, map_tensors
from ...data.private_names import private_name
from ...kernel.shards import Box, Kind, Piece, Reader
from ..common import model_state
from ..common.attached import in_place_of
from ..process_group.connections import of_further_groups
from ..process_group.copies import Held
from .counted import first_step

ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in (
        *("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam"),
        *("Adadelta", "Adagrad", "ASGD", "RMSprop"),
    )
    if hasattr(torch.optim, name)
)
"""Optimizers to which a tensor's elements are nothing but numbers: they may step a part of it.
torch's Rprop is not here: up to 2.8 at least it cannot write to a `DTensor` by index.
"""
BY_TENSOR = frozenset(
    getattr(torch.optim, name)
    for name in ("Adafactor", "Muon", "Rprop", "SparseAdam")
    if hasattr(torch.optim, name)
)
"""Optimizers that take each tensor by itself, and keep nothing but what belongs to one."""
FUSED = (torch.optim.Adam, torch.optim.AdamW)
"""Optimizers whose fused kernels accept `DTensor`s."""


_meshes: list[Any] = []


def make_mesh(kind: str, sizes: tuple[int, ...], names: tuple[str, ...] | None = None) -> Any:
    """Return the `DeviceMesh` of all ranks, which `forget_meshes` releases. All ranks call it
    together.
    """
    from torch.distributed.device_mesh import init_device_mesh

    with of_further_groups():
        _meshes.append(init_device_mesh(kind, sizes, mesh_dim_names=names))
    return _meshes[-1]


def forget_meshes() -> None:
    """Release the meshes at the end of a session.

    torch caches the results of operations by the ranks and names of a mesh. From these caches a
    tensor of the next session would get a mesh whose groups are gone. Other caches of torch hold
    meshes, and these hold groups, each with three threads that wake a hundred times a second. A
    sharded module is a cycle, which holds groups, too, until it is collected.
    """
    from torch.distributed.tensor import debug  # which imports torch's compiler

    forget = getattr(debug, "_clear_sharding_prop_cache", _forget_in_torch_28)
    forget()
    while _meshes:
        getattr(_meshes.pop(), "_pg_registry", {}).clear()  # torch 2.8 keeps no groups in a mesh
    gc.collect()


def _forget_in_torch_28() -> None:
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    # a partitioned embedding would keep its mask where an embedding of the last session did
    purpose = "training on one mesh after another"
    steps = private_name(
        "torch.distributed.tensor._redistribute", "_gen_transform_infos", purpose=purpose
    )
    steps.cache_clear()


def steps_parts(optimizer: torch.optim.Optimizer) -> bool:
    """True for an optimizer that may update each rank's part of a `DTensor` by itself."""
    kind = type(optimizer)
    return kind in ELEMENTWISE and (kind in FUSED or not optimizer.defaults.get("fused"))


def steps_tensors(optimizer: torch.optim.Optimizer) -> bool:
    """True for an optimizer that may update one whole tensor after another."""
    return type(optimizer) in ELEMENTWISE | BY_TENSOR


def is_sharded(tensor: Tensor) -> bool:
    """Return True if ranks hold different parts of the tensor."""
    return (
        isinstance(tensor, DTensor)
        and tensor.numel() > 0
        and not all(placement.is_replicate() for placement in tensor.placements)
    )


def is_sharded_once(tensor: Tensor) -> bool:
    """Return True if the tensor is sharded along at most one axis of its mesh."""
    sharded = [not each.is_replicate() for each in getattr(tensor, "placements", ())]
    return sum(sharded) <= 1


def own_part(tensor: Tensor) -> Tensor:
    """Return this rank's part, in place: all of a tensor that is not sharded."""
    # in this order: `detach` of a DTensor asks how its parts are placed, which takes much longer
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def own_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return this rank's parts of the gradients of those parameters that have one."""
    return [own_part(p.grad) for p in parameters if p.grad is not None]


def held(module: nn.Module, elsewhere: Collection[str]) -> Iterator[Held]:
    """Yield this rank's part of each parameter, to compare copies; None for those `elsewhere`."""
    for name, tensor in module.named_parameters():
        region = str(own_box(tensor)) if isinstance(tensor, DTensor) else ""
        yield Held(name, region, None if name in elsewhere else own_part(tensor))


def own_parts(module: nn.Module, elsewhere: Collection[str]) -> dict[str, tuple[Tensor, Hashable]]:
    """This rank's part of each parameter that is not elsewhere, and which elements these are: equal
    for two parameters of which it has the same."""
    shapes = {name: tuple(tensor.shape) for name, tensor in module.named_parameters()}
    return {
        name: (own, (shapes[name], region))
        for name, region, own in held(module, elsewhere)
        if own is not None
    }


def own_box(tensor: DTensor) -> Box:
    """The box of the whole tensor that `own_part` is, also where one dimension is sharded
    twice.

    torch's own answer is wrong where it is sharded twice and not evenly. FSDP shards what tensor
    parallelism has left, and says so by a `split_factor`.
    """
    mesh, place = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    placements: Sequence[Any] = tensor.placements
    assert place is not None, "this rank is not in the mesh of the tensor"
    shardings = [
        (getattr(each, "split_factor", 1), (each.dim, place[axis], mesh.size(axis)))
        for axis, each in enumerate(placements)
        if not each.is_replicate()
    ]
    return chunk_of(tuple(tensor.shape), [each for _, each in sorted(shardings, key=itemgetter(0))])


def num_replicas(tensor: DTensor, world_size: int) -> int:
    """Return the number of ranks that hold this shard. Ranks outside of the tensor's mesh hold it,
    too: those of an axis along which the tensor is not sharded."""
    axes = enumerate(tensor.placements)
    sizes = [tensor.device_mesh.size(axis) for axis, each in axes if not each.is_replicate()]
    return world_size // math.prod(sizes)


def chunk_of(shape: tuple[int, ...], shardings: Iterable[tuple[int, int, int]]) -> Box:
    """The part that is left after each sharding: along a dimension, the n-th of so many chunks.
    Chunks are equal, the last ones less."""
    offsets, sizes = [0] * len(shape), list(shape)
    for dim, number, num_chunks in shardings:
        chunk = -(-sizes[dim] // num_chunks)
        start = min(chunk * number, sizes[dim])
        offsets[dim] += start
        sizes[dim] = min(chunk, sizes[dim] - start)
    return Box(tuple(offsets), tuple(sizes))


def sharded_like(parameter: DTensor, part: Tensor) -> DTensor:
    """A tensor of the parameter's shape of which this rank holds `part`."""
    return _with_local(parameter, part.to(parameter.to_local().device))


def _with_local(tensor: DTensor, local: Tensor) -> DTensor:
    return DTensor.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def take_own(whole: Tensor, parameter: Tensor) -> Tensor:
    """A new tensor: the part of `whole` that this rank holds of the parameter."""
    if not isinstance(parameter, DTensor):
        return whole.clone()
    box = own_box(parameter)
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        whole = whole.narrow(dim, offset, size)
    return whole.clone()


def whole(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the whole tensor, on every rank. Ranks communicate on `device`."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.to_local().device.type != device.type:
        tensor = _with_local(tensor, tensor.to_local().to(device))
    placements = list(tensor.placements)
    for axis, each in enumerate(tensor.placements):
        if not each.is_replicate():  # one after the other: at once, torch warns that it takes two
            placements[axis] = Replicate()
            tensor = tensor.redistribute(placements=placements)
    return tensor.full_tensor()


# --- saving and restoring -------------------------------------------------------------------


def pieces(state: Mapping[Kind, Mapping[str, Tensor]], rank: int, size: int) -> Iterator[Piece]:
    """Yield the pieces that this rank writes: its parts of sharded tensors, of which the replicas
    write one part each in turn, and its share of all other tensors, which ranks partition."""
    return _pieces(state, lambda tensor, turn: _writes(tensor, turn, rank, size), rank, size)


def held_pieces(
    state: Mapping[Kind, Mapping[str, Tensor]], part: int, num_parts: int
) -> Iterator[Piece]:
    """Yield the pieces of one part of the state, which ranks hold in so many parts: this rank's
    parts of sharded tensors, whether or not it writes them, and a share of all other tensors."""
    return _pieces(state, lambda tensor, turn: True, part, num_parts)


def _pieces(
    state: Mapping[Kind, Mapping[str, Tensor]],
    takes: Callable[[DTensor, int], bool],
    part: int,
    num_parts: int,
) -> Iterator[Piece]:
    """Yield this rank's parts of the sharded tensors that `takes(tensor, turn)` accepts, and one
    of so many shares of all other tensors."""
    replicated: dict[Kind, dict[str, Tensor]] = {}
    for kind, tensors in state.items():
        for turn, (name, tensor) in enumerate(tensors.items()):
            own = own_part(tensor)
            if not is_sharded(tensor):
                replicated.setdefault(kind, {})[name] = own
                continue
            assert isinstance(tensor, DTensor)
            if own.numel() and takes(tensor, turn):
                yield Piece(kind, name, own, tuple(tensor.shape), own_box(tensor))
    yield from model_state.partitioned_pieces(replicated, part, num_parts)


def _writes(tensor: DTensor, turn: int, rank: int, size: int) -> bool:
    """Return True on the replica that writes this shard."""
    mesh = tensor.device_mesh
    outside = size // mesh.size()
    # ranks count through the axes outside of a mesh last
    replica = rank % outside
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            replica = replica * mesh.size(axis) + mesh.get_local_rank(axis)
    return replica == turn % num_replicas(tensor, size)


def read_weight(reader: Reader, name: str, tensor: Tensor) -> Tensor:
    """Read this rank's part of a weight, and no more."""
    if not is_sharded(tensor):
        return reader.read("weights", name)
    assert isinstance(tensor, DTensor)
    return reader.read("weights", name, own_box(tensor))


def read_optimizer_entry(reader: Reader, name: str, parameter: Tensor) -> Tensor:
    """State of the parameter's shape is sharded as the parameter is; any other is whole."""
    if not is_sharded(parameter) or reader.info("optimizer", name).shape != tuple(parameter.shape):
        return reader.read("optimizer", name)
    assert isinstance(parameter, DTensor)
    return sharded_like(parameter, reader.read("optimizer", name, own_box(parameter)))


# --- stepping on whole tensors --------------------------------------------------------------


class WholeStep:
    """Steps an optimizer to which a tensor is more than its elements, on whole tensors.

    Every rank gathers weights, gradients and state, makes the same update, and keeps its part.
    `apart`: one tensor at a time, for which an update costs the traffic of a gather of each and the
    memory of one; for optimizers that keep nothing but what belongs to one parameter. All others
    get one `step()`, and the memory of the whole model for as long. State of another shape than the
    parameter's is whole on every rank in between.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, device: torch.device, apart: bool = False
    ) -> None:
        self.optimizer, self.device, self.apart = optimizer, device, apart
        self._stepped = False

    def step(self) -> None:
        """Update the parameters with the optimizer's own step."""
        groups = self.optimizer.param_groups
        all_of_it = [(group, group["params"]) for group in groups]
        turns = [all_of_it]
        if self.apart:
            turns = [[(g, [p])] for g, ps in all_of_it for p in ps if p.grad is not None]
        try:
            for turn in turns:
                self._step(turn)
        finally:
            self.optimizer.param_groups = groups
            for group, parameters in all_of_it:
                group["params"] = parameters

    def _step(self, turn: Sequence[tuple[dict[str, Any], list[nn.Parameter]]]) -> None:
        """One `step()` on these parameters of these groups."""
        states = self.optimizer.state
        stand_ins: dict[nn.Parameter, nn.Parameter] = {}
        for group, parameters in turn:
            for parameter in parameters:
                if isinstance(parameter, DTensor) and parameter.grad is not None:
                    stand_ins[parameter] = self._stand_in(parameter)
            group["params"] = [stand_ins.get(p, p) for p in parameters]
        self.optimizer.param_groups = [group for group, _ in turn]
        if self.apart and not self._stepped:
            first_step(self.optimizer, "tensors")
        else:
            self.optimizer.step()
        self._stepped = True
        for parameter, stand_in in stand_ins.items():
            with torch.no_grad():
                own_part(parameter).copy_(take_own(stand_in.detach(), parameter))
            if stand_in in states:
                state = states.pop(stand_in)
                states[parameter] = {k: _own(value, parameter) for k, value in state.items()}

    def _stand_in(self, parameter: nn.Parameter) -> nn.Parameter:
        """The whole of it, with its gradient, and its state in the optimizer."""
        assert isinstance(parameter, DTensor) and parameter.grad is not None
        states, home = self.optimizer.state, parameter.to_local().device
        stand_in = in_place_of(parameter, whole(parameter, self.device).to(home))
        stand_in.grad = whole(parameter.grad, self.device).to(home)
        if parameter in states:
            state = states.pop(parameter)
            states[stand_in] = {k: _gathered(v, self.device, home) for k, v in state.items()}
        return stand_in


def _gathered(value: Any, device: torch.device, home: torch.device) -> Any:
    """An entry of a state with all tensors whole."""
    return map_leaves(
        lambda part: whole(part, device).to(home) if isinstance(part, DTensor) else part, value
    )


def _own(value: Any, parameter: Any) -> Any:
    """An entry of a state, tensors of the parameter's shape sharded as it is."""

    def own(tensor: Tensor) -> Tensor:
        alike = tensor.shape == parameter.shape and tensor.dim()
        return sharded_like(parameter, take_own(tensor, parameter)) if alike else tensor

    return map_tensors(own, value)
