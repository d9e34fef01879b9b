"""Layers that are partitioned over ranks, each by its inputs, outputs or positions.

The method is Megatron's (https://arxiv.org/abs/1909.08053), by torch's `DTensor`s. This module adds
the parts that these leave to their caller: tied weights stay tied, fused layers are partitioned
part by part, and sizes that do not divide are refused before anything is changed.
"""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...data.parallel import Parallel, TensorCut
from ...kernel.errors import RecipeError
from ...kernel.shards import Box, Flat, Kind, Piece, Reader, Region, TensorInfo
from ..fsdp import dtensor, meta_init
from .explaining import explain_shapes
from .logits import gather_without_gradient
from .matching import largest_divisor, matching
from .one_layer import Layer, layer_of
from .stages import placeholder

__all__ = [
    "Fused",
    "drop_weight",
    "partition_layers",
    "plan_layers",
    "plan_of_model",
    "sequence_modules",
    "used_on_parts",
]


@dataclass
class Fused:
    """Fused weights, such as queries, keys and values in one. Their rows in memory are in another
    order: each rank's part of the first weight, then of the second, and so on. So a rank's rows are
    one contiguous piece.
    """

    num_ranks: int
    parts: dict[str, int] = field(default_factory=dict)
    """FQN -> number of weights that are fused in it."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """FQN -> shape of the whole weight."""

    def reordered(self, name: str, whole: Tensor) -> Tensor:
        """Return the fused weight in the order in which it lies in memory."""
        return self._swapped(whole, self.parts[name], self.num_ranks)

    def in_order(self, name: str, whole: Tensor) -> Tensor:
        """Return the fused weight in the order in which the model knows it."""
        return self._swapped(whole, self.num_ranks, self.parts[name])

    def _swapped(self, whole: Tensor, first: int, second: int) -> Tensor:
        rows = whole.reshape(first, second, -1, *whole.shape[1:])
        return rows.transpose(0, 1).reshape(whole.shape).contiguous()

    def fqn_of(self, name: str, shape: Sequence[int]) -> str:
        """Return the FQN of the fused weight whose rows a weight, or a tensor of an optimizer, has;
        empty if there is none.
        """
        fqn = name.split("/", maxsplit=1)[0]
        return fqn if self.shapes.get(fqn) == tuple(shape) else ""

    def runs(self, name: str, shape: Sequence[int], box: Box) -> Iterator[tuple[Box, int, int]]:
        """Yield the boxes in the model's order that a box of memory holds. Each comes with its
        first row in that box of memory, and its number of rows.
        """
        parts = self.parts[name]
        rows = shape[0] // (parts * self.num_ranks)
        start, end = box.offsets[0], box.offsets[0] + box.sizes[0]
        while start < end:
            block, within = divmod(start, rows)
            rank, part = divmod(block, parts)
            taken = min(rows - within, end - start)
            offset = (part * self.num_ranks + rank) * rows + within
            yield (
                Box((offset, *box.offsets[1:]), (taken, *box.sizes[1:])),
                start - box.offsets[0],
                taken,
            )
            start += taken


@dataclass(frozen=True)
class ReorderedReader:
    """A reader of a checkpoint that returns fused weights in their order in memory."""

    inner: Reader
    fused: Fused

    def names(self, kind: Kind) -> Sequence[str]:
        """See `Reader`."""
        return self.inner.names(kind)

    def info(self, kind: Kind, name: str) -> TensorInfo:
        """See `Reader`."""
        return self.inner.info(kind, name)

    def read(
        self, kind: Kind, name: str, region: Region | None = None, out: Tensor | None = None
    ) -> Tensor:
        """See `Reader`."""
        fqn = ""
        if kind != "state":
            shape = self.inner.info(kind, name).shape
            fqn = self.fused.fqn_of(name, shape)
        if not fqn:
            return self.inner.read(kind, name, region, out)
        if isinstance(region, Flat):
            raise TypeError("weights that are several in one are read in boxes")
        box = region or Box((0,) * len(shape), tuple(shape))
        found = [self.inner.read(kind, name, own) for own, _, _ in self.fused.runs(fqn, shape, box)]
        joined = torch.cat(found) if found else self.inner.read(kind, name, box)
        return joined if out is None else out.copy_(joined)


def split(piece: Piece, fused: Fused) -> Iterator[Piece]:
    """Split a piece of a fused weight into boxes in the model's order."""
    fqn = "" if piece.kind == "state" else fused.fqn_of(piece.name, piece.shape)
    if not fqn:
        yield piece
        return
    assert not isinstance(piece.region, Flat)
    box = piece.region or Box((0,) * len(piece.shape), piece.shape)
    for own, start, taken in fused.runs(fqn, piece.shape, box):
        yield Piece(piece.kind, piece.name, piece.tensor.narrow(0, start, taken), piece.shape, own)


def plan_layers(module: nn.Module, parallel: Parallel, size: int) -> tuple[list[Layer], Fused]:
    """Return the layers that the recipe partitions over `size` ranks, and which weights are fused;
    changes nothing. Raises `RecipeError` for a pattern that matches nothing or two things, and for
    sizes that do not divide.
    """
    layers = {
        name: layer_of(name, how, module.get_submodule(name))
        for name, how in _styles(module, parallel).items()
        if how not in _ON_PARTS
    }
    fused = Fused(size)
    for pattern, name in matching(module, "fused", parallel.fused):
        if name not in layers or layers[name].how != "column":
            raise RecipeError(
                f"Parallel.fused names {name!r}, which Parallel.tensor does not partition by "
                "'column'"
            )
        layers[name].check_order()
        for key in layers[name].dims:
            fused.parts.setdefault(f"{name}.{key}", parallel.fused[pattern])
    for layer in layers.values():
        _check(layer, size, fused)
    return [*layers.values()], fused


def partition_layers(
    module: nn.Module,
    parallel: Parallel,
    mesh: Any,
    tied: Sequence[Sequence[str]],
    absent: AbstractSet[nn.Parameter] = frozenset(),
) -> Fused:
    """Partition the layers that the recipe names over the ranks of `mesh`. Placeholders of `absent`
    weights stay without memory. Raises like `plan_layers`, before anything is changed.
    """
    layers, fused = plan_layers(module, parallel, mesh.size())
    with torch.no_grad():
        for name in fused.parts:
            weight = module.get_parameter(name)
            fused.shapes[name] = tuple(weight.shape)
            if weight not in absent:
                weight.data = fused.reordered(name, weight)
    between = Shard(1) if sequence_modules(module, parallel) else Replicate()
    # the view is of an output that a layer has made whole for its caller
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    for layer in layers:
        empty = [key for key, weight in layer.part.named_parameters() if weight in absent]
        layer.parallelise(mesh, between)
        for key in empty:
            drop_weight(layer.part, key)
        if layer.how == "logits":
            layer.part.register_forward_hook(gather_without_gradient)
    _tie_again(module, tied)
    explain_shapes(module, parallel.tensor or plan_of_model(module, parallel.experts))
    return fused


def used_on_parts(module: nn.Module, parallel: Parallel) -> list[str]:
    """Return the FQNs of replicated weights that ranks use on parts of heads or positions. Raises
    `RecipeError` for a tied one that is also used elsewhere.
    """
    inside = [name for name, how in _styles(module, parallel).items() if how in _ON_PARTS]
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if not isinstance(parameter, DTensor):
            names.setdefault(parameter, []).append(name)
    found = []
    for first, *others in names.values():
        on_parts = [any(n.startswith(f"{part}.") for part in inside) for n in (first, *others)]
        if any(on_parts) and not all(on_parts):
            raise RecipeError(
                f"{', '.join([first, *others])} are one parameter, of which Parallel.tensor names "
                "one by 'sequence' or 'heads': name all, or none"
            )
        found += [first] if all(on_parts) else []
    return found


def sequence_modules(module: nn.Module, parallel: Parallel) -> list[nn.Module]:
    """Return the modules that compute on parts of the positions."""
    chosen = _styles(module, parallel).items()
    return [module.get_submodule(name) for name, how in chosen if how == "sequence"]


def _styles(module: nn.Module, parallel: Parallel) -> dict[str, TensorCut]:
    """Return how each submodule is partitioned, by name."""
    plan = parallel.tensor or plan_of_model(module, parallel.experts)
    if not plan:
        raise RecipeError(
            "backend.tensor is more than 1, and the recipe does not say how layers are "
            "partitioned: give it parallel=drivetrain.Parallel(tensor={PATTERN: 'column', ...}), "
            "or set backend.tensor=1"
        )
    found: dict[str, str] = {}  # name -> the first pattern that matches
    for pattern, name in matching(module, "tensor", plan):
        first = found.setdefault(name, pattern)
        if plan[first] != plan[pattern]:
            raise RecipeError(
                f"Parallel.tensor partitions {name!r} in two ways: {plan[first]!r} by {first!r}, "
                f"and {plan[pattern]!r} by {pattern!r}"
            )
    for name, pattern in found.items():
        if outer := next((other for other in found if name.startswith(f"{other}.")), None):
            raise RecipeError(
                f"Parallel.tensor partitions {name!r} by {pattern!r}, which is inside of "
                f"{outer!r}, and {outer!r} by {found[outer]!r}: name one of them"
            )
    return {name: plan[pattern] for name, pattern in found.items()}


def plan_of_model(module: nn.Module, experts: Sequence[str]) -> Mapping[str, TensorCut]:
    """Return the plan that a model of transformers brings along, in this driver's terms, also for a
    model inside another module. Modules of experts are left out: they stay whole unless `expert`
    partitions them. Raises `RecipeError` for a style that has no counterpart here.
    """
    found: dict[str, TensorCut] = {}
    inside = [*experts, *(f"{pattern}.*" for pattern in experts)]
    names = [name for name, _ in module.named_modules()]
    for prefix, plan in _plans(module):
        for pattern, how in plan.items():
            if any(fnmatch.fnmatchcase(f"{prefix}{pattern}", each) for each in inside):
                continue
            if how not in _COUNTERPARTS:
                raise RecipeError(
                    f"the model's own plan partitions {pattern!r} by {how!r}, which is not done "
                    "here: say how layers are partitioned by Parallel(tensor={PATTERN: 'column', "
                    "...}), or set backend.tensor=1"
                )
            if fnmatch.filter(names, f"{prefix}{pattern}"):  # a model may lack some
                found[f"{prefix}{pattern}"] = _COUNTERPARTS[how]
    return found


def _plans(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield the plan of each outermost model that has one, with the prefix of its names."""
    # only a plan of its own: an adapter passes look-ups of attributes on to its model
    if hasattr(type(module), "tp_plan") or "tp_plan" in vars(module):
        yield prefix, cast(Any, module).tp_plan or {}
        return
    for name, part in module.named_children():
        yield from _plans(part, f"{prefix}{name}.")


_COUNTERPARTS: Mapping[str, TensorCut] = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_gather_output": "vocabulary",
    "colwise_rep": "vocabulary",
    "embedding_rowwise": "vocabulary",
    "replicated_with_grad_allreduce": "heads",
}
_ON_PARTS = ("heads", "sequence")
"""Styles whose modules compute with whole weights on a part of the input."""


def _check(layer: Layer, size: int, fused: Fused) -> None:
    """Raise `RecipeError` for a layer whose size `size` ranks do not divide."""
    name, how, width = layer.name, layer.how, layer.width
    if how in ("vocabulary", "logits") and not _each_has_rows(width, size):
        most = max(n for n in range(1, size) if _each_has_rows(width, n))
        raise RecipeError(
            f"{name!r} is partitioned by {how!r} over backend.tensor={size} ranks, and of its "
            f"{width} rows the last rank would have none; backend.tensor={most} would do"
        )
    if how not in ("column", "row"):
        return
    num_fused = max(fused.parts.get(f"{name}.{key}", 1) for key in layer.dims)
    if width % (size * num_fused):
        of = f" of {num_fused} in one" if num_fused > 1 else ""
        largest = 1 if width % num_fused else largest_divisor(width // num_fused, size)
        raise RecipeError(
            f"{name!r} is partitioned by {how!r} over backend.tensor={size} ranks, which does not "
            f"divide its {width} {'outputs' if how == 'column' else 'inputs'}{of}; "
            f"backend.tensor={largest} would do"
        )


def _each_has_rows(rows: int, size: int) -> bool:
    """Return True if each of `size` equal chunks has rows; the last chunk may be shorter."""
    return -(-rows // size) * (size - 1) < rows


@torch.no_grad()
def drop_weight(part: nn.Module, key: str) -> None:
    """Replace a weight by a placeholder that is partitioned as the weight would be and takes no
    memory.
    """
    stand_in = part.get_parameter(key)
    if isinstance(stand_in, DTensor):
        own = stand_in.to_local()
        empty = dtensor.sharded_like(stand_in, placeholder(own, own.device))
        replaced = nn.Parameter(empty, stand_in.requires_grad)
        meta_init.replace(part, {stand_in: replaced})


def _tie_again(module: nn.Module, tied: Sequence[Sequence[str]]) -> None:
    """Tie weights again that partitioning has separated. Raises `RecipeError` if they are
    partitioned differently.
    """
    for first, *others in tied:
        kept = module.get_parameter(first)
        for name in others:
            owner, _, key = name.rpartition(".")
            other = module.get_parameter(name)
            if getattr(kept, "placements", None) != getattr(other, "placements", None):
                raise RecipeError(
                    f"{first!r} and {name!r} are one parameter, and Parallel.tensor partitions "
                    "them in different ways: partition both by 'vocabulary', or neither"
                )
            module.get_submodule(owner)._parameters[key] = kept
