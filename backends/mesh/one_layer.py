"""One layer that is cut over ranks, or what stands in for one: an adapter around it, say.

Within it all is a `DTensor`: what it is given and what it makes, the weights that are cut, and the
others, which every rank holds whole. So whatever an adapter does with its parts is right, and only
how much travels depends on which of them are cut.
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
    """What is cut, and how."""

    name: str
    how: TensorCut
    part: nn.Module
    layer: nn.Module
    """The part, or the one within that it stands for."""
    width: int
    """Of what it is cut by: inputs of `row`, outputs or rows of others."""
    cut: Mapping[str, int]
    """The dimension along which each of its weights is cut, by its name within; all others every
    rank holds whole. Of an adapter those are cut that have the size of the layer there."""

    def check_order(self) -> None:
        """Raises `RecipeError` where its outputs cannot come in another order, since an adapter has
        something else of their number."""
        for name, weight in self.part.named_parameters():
            if weight is not self.layer.weight and self.width in weight.shape[1:]:
                raise RecipeError(
                    f"Parallel.fused names {self.name!r}, a {type(self.part).__name__} of "
                    f"{self.width} outputs, whose {name} is {tuple(weight.shape)}: which of its "
                    "sizes are outputs cannot be told. Take an adapter of another rank, adapt "
                    "other layers, or set backend.tensor=1"
                )

    def parallelise(self, mesh: Any, between: Any) -> None:
        """Cut it over `mesh`; `between` is how activations lie that no layer cuts. Every rank has
        built the same weights, so nobody sends any."""
        for name, weight in list(self.part.named_parameters(remove_duplicate=False)):
            owner, _, key = name.rpartition(".")
            dim = self.cut.get(name)
            placement = Replicate() if dim is None else Shard(dim)
            own = distribute_tensor(weight.detach(), mesh, [placement], src_data_rank=None)
            replaced = nn.Parameter(own, weight.requires_grad)
            self.part.get_submodule(owner)._parameters[key] = replaced
        given, taken, made = self._ways(between)

        def take(part: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            first, *others = args
            if not isinstance(first, DTensor):
                first = DTensor.from_local(first, mesh, [given], run_check=False)
            return _lying(first, taken), *others

        def give(part: nn.Module, args: tuple[Any, ...], output: DTensor) -> Tensor:
            output = _lying(output, made)
            return output if self.how == "logits" else output.to_local()

        self.part.register_forward_pre_hook(take)
        self.part.register_forward_hook(give)

    def _ways(self, between: Any) -> tuple[Any, Any, Any]:
        """How activations lie that it is given, that it takes, and that it makes."""
        channels, whole = Shard(-1), Replicate()
        if isinstance(self.layer, nn.Embedding):
            return whole, whole, between
        return {
            "column": (between, whole, channels),
            "row": (channels, channels, between),
            "vocabulary": (between, whole, whole),
            "logits": (between, whole, channels),
        }[self.how]


def _lying(tensor: DTensor, way: Any) -> DTensor:
    if tensor.placements == (way,):
        return tensor
    return tensor.redistribute(placements=[way])


def layer_of(name: str, how: TensorCut, part: nn.Module) -> Layer:
    """The submodule `part`, to be cut so. Raises `RecipeError` for one that cannot be."""
    if buffers := [key for key, buffer in part.named_buffers() if buffer.dim()]:
        raise RecipeError(
            f"Parallel.tensor cuts {name!r} by {how!r}, which has buffers ({', '.join(buffers)}): "
            "what is cut may have weights alone. Adapt other layers, or set backend.tensor=1"
        )
    dim = 1 if how == "row" else 0
    layer = _stands_for(name, how, part)
    width = layer.get_parameter("weight").shape[dim]
    weights = part.named_parameters(remove_duplicate=False)
    cut = {key: dim for key, weight in weights if weight.shape[dim : dim + 1] == (width,)}
    return Layer(name, how, part, layer, width, cut)


def _stands_for(name: str, how: TensorCut, part: nn.Module) -> nn.Module:
    """The layer itself, or that of a module that gives the sizes of one as its own and has it."""
    kinds = _KINDS[how]
    sizes = [getattr(part, f"{which}_features", None) for which in ("in", "out")]
    inside = part.modules() if None not in sizes else (part,)
    layer = next((each for each in inside if isinstance(each, kinds)), None)
    if layer is None:
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise RecipeError(
            f"Parallel.tensor cuts {name!r} by {how!r}, which is for {wanted}, and it is "
            f"{type(part).__name__}"
        )
    weight = layer.get_parameter("weight")
    if not weight.is_floating_point() or (
        isinstance(layer, nn.Linear) and weight.shape != (layer.out_features, layer.in_features)
    ):
        raise RecipeError(
            f"Parallel.tensor cuts {name!r} by {how!r}, whose weight is {tuple(weight.shape)} of "
            f"{weight.dtype}: quantized layers are not cut. Load the model in a floating point "
            "dtype, or set backend.tensor=1"
        )
    return layer
