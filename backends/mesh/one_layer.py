"""One layer that is partitioned over ranks, or a module that stands for one, such as an adapter.

Within the module all tensors are `DTensor`s: its inputs and outputs, its partitioned weights, and
the others, which every rank holds whole. So an adapter computes right, whatever it does with its
parts. Only the amount of communication depends on which weights are partitioned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ...data.parallel import TensorCut
from ...kernel.errors import RecipeError

__all__ = ["Layer", "layer_of"]

_KINDS: Mapping[TensorCut, tuple[type[nn.Module], ...]] = {
    "column": (nn.Linear,),
    "row": (nn.Linear,),
    "vocabulary": (nn.Linear, nn.Embedding),
    "logits": (nn.Linear,),
}


@dataclass(frozen=True)
class Layer:
    """A partitioned layer and the style of its partition."""

    name: str
    how: TensorCut
    part: nn.Module
    layer: nn.Module
    """The part itself, or the layer inside it that it stands for."""
    width: int
    """Size that is partitioned: inputs of `row`, outputs or rows of other styles."""
    dims: Mapping[str, int]
    """Dimension along which each partitioned weight of the part is split, by its name in the part.
    All other weights are replicated. An adapter's weight is partitioned if it has the layer's size
    in that dimension.
    """

    def check_order(self) -> None:
        """Raise `RecipeError` if outputs cannot be reordered, since an adapter has another
        dimension of the same size.
        """
        for name, weight in self.part.named_parameters():
            if weight is not self.layer.weight and self.width in weight.shape[1:]:
                raise RecipeError(
                    f"Parallel.fused names {self.name!r}, a {type(self.part).__name__} of "
                    f"{self.width} outputs, whose {name} is {tuple(weight.shape)}: it is "
                    "ambiguous which of its sizes are outputs. Take an adapter of another rank, "
                    "adapt other layers, or set backend.tensor=1"
                )

    def parallelise(self, mesh: Any, between: Any) -> None:
        """Partition the part over `mesh`. `between`: the placement of activations outside
        partitioned layers. No rank sends any weight, since all have built the same ones.
        """
        for name, weight in list(self.part.named_parameters(remove_duplicate=False)):
            owner, _, key = name.rpartition(".")
            dim = self.dims.get(name)
            placement = Replicate() if dim is None else Shard(dim)
            own = distribute_tensor(weight.detach(), mesh, [placement], src_data_rank=None)
            replaced = nn.Parameter(own, weight.requires_grad)
            self.part.get_submodule(owner)._parameters[key] = replaced
        passed, needed, returned = self._activation_placements(between)

        def distribute_input(part: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            first, *others = args
            if not isinstance(first, DTensor):
                first = DTensor.from_local(first, mesh, [passed], run_check=False)
            return _redistributed(first, needed), *others

        def redistribute_output(part: nn.Module, args: tuple[Any, ...], output: DTensor) -> Tensor:
            output = _redistributed(output, returned)
            return output if self.how == "logits" else output.to_local()

        self.part.register_forward_pre_hook(distribute_input)
        self.part.register_forward_hook(redistribute_output)

    def _activation_placements(self, between: Any) -> tuple[Any, Any, Any]:
        """Return the placements of the activations that the part is given, takes, and returns."""
        channels, whole = Shard(-1), Replicate()
        if isinstance(self.layer, nn.Embedding):
            return whole, whole, between
        return {
            "column": (between, whole, channels),
            "row": (channels, channels, between),
            "vocabulary": (between, whole, whole),
            "logits": (between, whole, channels),
        }[self.how]


def _redistributed(tensor: DTensor, placement: Any) -> DTensor:
    if tensor.placements == (placement,):
        return tensor
    return tensor.redistribute(placements=[placement])


def layer_of(name: str, how: TensorCut, part: nn.Module) -> Layer:
    """Return the submodule `part` as a layer to be partitioned. Raises `RecipeError` for one that
    cannot be.
    """
    if buffers := [key for key, buffer in part.named_buffers() if buffer.dim()]:
        raise RecipeError(
            f"Parallel.tensor partitions {name!r} by {how!r}, which has buffers "
            f"({', '.join(buffers)}): a partitioned layer may have weights alone. Adapt other "
            "layers, or set backend.tensor=1"
        )
    dim = 1 if how == "row" else 0
    layer = _find_layer(name, how, part)
    width = layer.get_parameter("weight").shape[dim]
    weights = part.named_parameters(remove_duplicate=False)
    dims = {key: dim for key, weight in weights if weight.shape[dim : dim + 1] == (width,)}
    return Layer(name, how, part, layer, width, dims)


def _find_layer(name: str, how: TensorCut, part: nn.Module) -> nn.Module:
    """Return the layer itself, or the layer inside an adapter, which is a module that has
    `in_features` and `out_features` of its own.
    """
    kinds = _KINDS[how]
    sizes = [getattr(part, f"{which}_features", None) for which in ("in", "out")]
    inside = part.modules() if None not in sizes else (part,)
    layer = next((each for each in inside if isinstance(each, kinds)), None)
    if layer is None:
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise RecipeError(
            f"Parallel.tensor partitions {name!r} by {how!r}, which is for {wanted}, and it is "
            f"{type(part).__name__}"
        )
    if "weight" not in layer._parameters:
        raise RecipeError(
            f"Parallel.tensor partitions {name!r} by {how!r}, whose weight is made of others in "
            "each forward (weight_norm, or another of torch.nn.utils.parametrize): such a weight "
            "is not partitioned. Leave the layer out of Parallel.tensor, take the parametrization "
            "off (torch.nn.utils.parametrize.remove_parametrizations), or set backend.tensor=1"
        )
    _refuse_options(name, how, layer)
    weight = layer.get_parameter("weight")
    if not weight.is_floating_point() or (
        isinstance(layer, nn.Linear) and weight.shape != (layer.out_features, layer.in_features)
    ):
        raise RecipeError(
            f"Parallel.tensor partitions {name!r} by {how!r}, whose weight is "
            f"{tuple(weight.shape)} of {weight.dtype}: quantized layers are not partitioned. Load "
            "the model in a floating point dtype, or set backend.tensor=1"
        )
    return layer


def _refuse_options(name: str, how: TensorCut, layer: nn.Module) -> None:
    """Raise `RecipeError` for options of an embedding that need all of its rows."""
    options = [
        key for key in ("max_norm", "sparse", "scale_grad_by_freq") if getattr(layer, key, 0)
    ]
    if options:
        raise RecipeError(
            f"Parallel.tensor partitions {name!r} by {how!r}, an Embedding with "
            f"{' and '.join(options)}, which needs all of its rows: leave it out of "
            "Parallel.tensor, so that every rank computes with all of it, or build it without "
            f"{' and '.join(options)}"
        )
