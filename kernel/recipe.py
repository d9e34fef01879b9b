"""A user's part: the model, the loss and the data of a training, and nothing of hardware."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .errors import RecipeError

__all__ = ["Batch", "Microstep", "Recipe", "check_loss"]

Batch = Any
"""Return value of the collate function: a tensor, or a dict, list or tuple of batches."""


@dataclass(frozen=True)
class Recipe:
    """A training. Factories, not objects: the driver decides when and where each is built.

    Only `model` and `loss` are needed to step; `train_data` to fit."""

    model: Callable[[], nn.Module]
    """Builds the model, on the CPU or on the meta device; on every rank by the same seed."""

    loss: Callable[[nn.Module, Batch], Tensor]
    """`loss(module, batch)`: the SUM of the loss over the items of the batch (see `loss_is`), a
    scalar. Call the `module` that is passed, not one kept aside. Where updates differ (see
    `Turns`), it has `of_update(number)`: the loss of that one, from 1, which may train a part of
    the model; for the others `requires_grad` is False from its call on."""

    train_data: Any = None
    """A map-style data set: `__len__` and `__getitem__` (or `__getitems__`, used if defined); a
    stream: an iterable of samples, or a function without arguments that makes one for each epoch;
    or ready `Batches` of a loader of your own."""

    lengths: Sequence[int] | None = None
    """Length of each sample of `train_data` (in tokens, say), for the setting `data.by_length`."""

    eval_data: Mapping[str, Any] = field(default_factory=dict)
    """Named data, of any of these kinds, that the model does not train on."""

    collate: Callable[[list[Any]], Batch] | None = None
    """Makes a batch of a list of samples; by default `torch.utils.data.default_collate`."""

    count_items: Callable[[Batch], int] | None = None
    """The number of items in a batch, on the host, before it is moved; by default one item a
    sample. The global sum of it divides the loss."""

    loss_is: Literal["sum", "mean"] = "sum"
    """`mean`: `loss` returns the mean over the batch's items, and is multiplied by their number."""

    optimizer: Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer] | None = None
    """Builds the optimizer from (FQN, parameter) pairs; by default the one in the settings."""

    schedule: Callable[[Any], Any] | None = None
    """`schedule(applied)`: the factor of learning rates after so many applied updates; or, given an
    optimizer, an `LRScheduler` of torch's for it. By default the one in the settings."""

    measure: Callable[[nn.Module, Batch], Mapping[str, Tensor]] | None = None
    """Named tensors that evaluation adds up: each a SUM over the batch, so that sums of batches and
    ranks are exact. Default: `{"loss": loss(module, batch)}`. The kernel adds items and samples."""

    summarise: Callable[[Mapping[str, Tensor]], Mapping[str, float]] | None = None
    """Metrics of the sums over the whole data (float64, on the host); by default the mean loss."""

    step: Callable[[nn.Module, Batch, Microstep], Tensor] | None = None
    """Takes over forward and backward of a microbatch, for a loss that is normalised in another
    way: `step(module, batch, microstep)` calls `microstep.backward` and returns the detached loss
    to report. What is given to `backward` is summed over microbatches and averaged over feeders."""

    after_update: Callable[[Mapping[str, Tensor], int], None] | None = None
    """`after_update(weights, number)` changes weights in place, after the applied update of that
    number, from 1: averages of a teacher, clipping, projections. `weights`: by FQN this rank's
    elements of each parameter, flat. Each element by itself, from those at the same place in
    others. It keeps nothing between calls, draws no random numbers, and may be called again."""

    parallel: Any = None
    """How drivers may partition layers and sequences of the model: a `drivetrain.Parallel`."""

    flops_per_item: float | None = None
    """FLOPs of forward and backward on one item, to report the share of the peak; None: none."""


@dataclass(slots=True)
class Microstep:
    """One microbatch of an update, as `Recipe.step` sees it."""

    index: int
    """Number of the microbatch in its update, from 0."""
    num_microbatches: int
    """Number of microbatches of this update; the same on every feeder."""
    num_feeders: int
    """`backward` averages over so many feeders: of a SUM it takes num_feeders * sum / num_items."""
    num_items: Callable[[], float]
    """Items of the global batch. The first call of an update waits for the other ranks."""
    autocast: Callable[[], AbstractContextManager[Any]]
    """Encloses the forward."""
    _backward: Callable[[Tensor, float], Tensor]
    weight: float
    """Weight of the samples: 1, less where they are repeated, 0 for those of no share."""

    @property
    def last(self) -> bool:
        """True if the update follows."""
        return self.index == self.num_microbatches - 1

    def backward(self, loss: Tensor, weight: float = 1.0) -> Tensor:
        """Adds the gradient of `weight * loss`, a scalar; returns it detached, and 0 for a
        microbatch that only keeps its feeder in step with the others."""
        return self._backward(loss, self.weight * weight)


def check_loss(loss: object, of: str = "recipe.loss") -> None:
    """Raises `RecipeError` unless `of` returned a scalar that a gradient flows from to a module."""
    if not isinstance(loss, Tensor):
        raise RecipeError(
            f"{of} returned {type(loss).__name__}; it must return a scalar tensor: the sum "
            "of the loss over the items of the batch. For several named parts: LossParts(loss)"
        )
    if loss.dim() != 0:
        raise RecipeError(
            f"{of} returned a tensor of shape {tuple(loss.shape)}; it must return a scalar: "
            "the sum of the loss over the items of the batch (use .sum() or reduction='sum')"
        )
    if not loss.requires_grad or (loss.is_leaf and not isinstance(loss, nn.Parameter)):
        raise RecipeError(
            f"{of} returned a tensor {'of its own' if loss.requires_grad else 'without a gradient'}"
            "; call the module that is passed in, and do not detach its output. For a batch "
            "without targets return zero times its output: other ranks wait for the gradients"
        )
