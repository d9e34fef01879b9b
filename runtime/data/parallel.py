"""What a recipe says of its model and batches to drivers that cut layers and sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torch import Tensor, nn

from ..kernel.errors import RecipeError

__all__ = ["Parallel", "TensorCut"]

TensorCut = Literal["column", "row", "vocabulary", "logits", "heads", "sequence"]


@dataclass(frozen=True)
class Parallel:
    """How a model may be cut: `Recipe.parallel`. Drivers that cut nothing have no use for it."""

    tensor: Mapping[str, TensorCut] = field(default_factory=dict)
    """For patterns (`fnmatch`) of submodules' names, how each is cut over ranks
    (https://arxiv.org/abs/1909.08053). `column`: a linear layer by its outputs, each rank with its
    own heads or hidden units; the layers between it and the `row` compute on what they are given,
    so that a head is found by its size (`view(..., -1, head_size)`), not by the number of heads.
    `row`: a linear layer by its inputs, whose outputs are added up. `vocabulary`: an embedding by
    its rows, or the head by its outputs, which every rank is given whole; need not divide.
    `logits`: the head likewise, whose outputs stay cut while there are gradients, for losses by
    `torch.nn.functional.cross_entropy`: no rank then holds the logits of all words.
    `heads`: a normalisation of single heads, between `column` and `row`, on each rank's own.
    `sequence`: a normalisation, a router, or what else has weights between `row` and `column`, on a
    part of the positions each (https://arxiv.org/abs/2205.05198), dimension 1 of (batch, sequence,
    channels). In the place of a layer may stand what has it within and its `in_features` and
    `out_features`, as adapters of PEFT do: of its weights those are cut that have the layer's size
    there."""

    fused: Mapping[str, int] = field(default_factory=dict)
    """For patterns of `column` layers that are several in one, of equal sizes one after the other
    (queries, keys and values; gate and up): how many."""

    experts: Sequence[str] = ()
    """Patterns of modules that hold the experts of a mixture, of which each rank of an
    expert-parallel driver gets its part. Their weights are stacked, one row of dimension 0 for each
    expert, and they are called with tokens (N, D), the indices of the experts that each goes to
    (N, K), and what their answers weigh (N, K), and return (N, D), whatever order the tokens are
    in."""

    stages: Sequence[str] = ()
    """Patterns of the blocks that a pipeline-parallel driver deals to its stages, in the model's
    order; by default its repeated blocks. The model calls them in this order, each once, and what
    it hands from one to the next is the first argument of a block, a tensor, and what a block
    returns. What else it gives them it makes of its own input alone. What is not in a block belongs
    to the one before it in the model's order, or to the first."""

    sequence: Mapping[str, int] = field(default_factory=dict)
    """For names of a batch, which is a mapping: the dimension that is the sequence, along which a
    context-parallel driver cuts. The loss must be a sum over positions."""

    positions: str = ""
    """The name under which a batch that is cut along sequences tells the model where its positions
    are, integers of shape (1, length); made by the driver where the batch has none of that name."""

    compare: bool | Callable[[nn.Module, Any], Tensor] = True
    """Before the first update drivers compare the loss of what they have cut with that of the
    whole, on the first batch of each rank: by `Recipe.loss`, or by this, of the same module and
    batch, where a `Recipe.step` trains by another. False: not, as with `backend.check=false`."""

    def __post_init__(self) -> None:
        for pattern, how in self.tensor.items():
            if how not in get_args(TensorCut):
                known = ", ".join(get_args(TensorCut))
                raise RecipeError(f"Parallel.tensor[{pattern!r}] is {how!r}; it may be {known}")
        for field_name in ("experts", "stages"):
            if isinstance(named := getattr(self, field_name), str):
                raise RecipeError(
                    f"Parallel.{field_name} is {named!r}; it must be a list: [{named!r}]"
                )
        for pattern, parts in self.fused.items():
            if parts < 2:
                raise RecipeError(f"Parallel.fused[{pattern!r}] is {parts}; it must be at least 2")
