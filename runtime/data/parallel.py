"""Properties of a recipe's model and batches, for drivers that partition layers and sequences."""

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
    """How a model may be partitioned: `Recipe.parallel`. Drivers that partition nothing ignore
    it."""

    tensor: Mapping[str, TensorCut] = field(default_factory=dict)
    """For patterns (`fnmatch`) of submodules' names, how each is partitioned over ranks
    (https://arxiv.org/abs/1909.08053). `column`: a linear layer by its outputs, so each rank has
    its own heads or hidden units. Layers between `column` and `row` compute on the local part, so
    the model must split heads by their size (`view(..., -1, head_size)`), not by their number.
    `row`: a linear layer by its inputs, whose outputs are summed over ranks. `vocabulary`: an
    embedding by its rows, or the head by its outputs, which are gathered to every rank; the size
    need not divide. `logits`: the head as with `vocabulary`, but its outputs stay partitioned while
    gradients are computed, for losses by `torch.nn.functional.cross_entropy`: no rank then holds
    the logits of all words. `heads`: a normalisation of single heads between `column` and `row`, on
    each rank's own heads. `sequence`: a normalisation, a router, or another module with weights
    between `row` and `column`, on each rank's part of the positions
    (https://arxiv.org/abs/2205.05198), dimension 1 of (batch, sequence, channels). A wrapper with
    the layer inside and the layer's `in_features` and `out_features`, such as an adapter of PEFT,
    may replace a layer: its weights with the layer's size in a dimension are partitioned along
    it."""

    fused: Mapping[str, int] = field(default_factory=dict)
    """For patterns of `column` layers that fuse several layers of equal size, one after the other
    (queries, keys and values; gate and up): the number of fused layers."""

    experts: Sequence[str] = ()
    """Patterns of modules that hold the experts of a mixture. Each rank of an expert-parallel
    driver gets a part of the experts. The weights are stacked, with one row of dimension 0 for each
    expert. The module is called with tokens (N, D), the indices of each token's experts (N, K), and
    the weights of these experts' outputs (N, K), and returns (N, D). The result must not depend on
    the order of tokens."""

    stages: Sequence[str] = ()
    """Patterns of the blocks that a pipeline-parallel driver partitions into stages, in the model's
    order; by default the model's repeated blocks. The model calls the blocks in this order, each
    once. A block's first argument is a tensor, the output of the block before. The model computes
    all other arguments of blocks from its own input alone. A module outside of all blocks belongs
    to the block before it in the model's order, or to the first block."""

    sequence: Mapping[str, int] = field(default_factory=dict)
    """For each name in a batch, which is a mapping: the sequence dimension, along which a
    context-parallel driver partitions. The loss must be a sum over positions."""

    positions: str = ""
    """The name in a batch of the positions of a partitioned sequence, integers of shape (1,
    length). The driver adds them if the batch has no such name."""

    compare: bool | Callable[[nn.Module, Any], Tensor] = True
    """Before the first update drivers compare the gradients of the partitioned model with those of
    the whole model, on the first batch of each rank, at slightly perturbed weights. They use
    `Recipe.loss`, or this function of module and batch, for a `Recipe.step` that trains by another
    loss. False skips the comparison, as `backend.check=false` does."""

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
