"""The contract between what to train, when, and where.

A `Recipe` says *what* to train, the kernel decides *when* and *how much*, a driver says *where*
and *how*. A driver is three objects, one for each stage of a process's life:

=========  ============================  ====================================================
`Driver`   no process group exists yet   what it is called, what it can do, whether it runs here
`Session`  the process is up             device, communication, random state, feeding
`Engine`   the model is wrapped          the step, evaluate and save contracts
=========  ============================  ====================================================

This file holds types and docstrings and no logic. The laws that a driver must keep are proved by
the conformance suite; each docstring names the law it belongs to.

Words. *Rank*: one process. *Feeder*: the ranks that bring one loss of their own, mostly one rank
(under single-program multi-data it serves many devices); ranks that cut a layer are one feeder
together. *Reader*: the feeders that share their samples, mostly one; several where sequences are
cut over them. *Global batch*: the samples of one update. *Microbatch*: what one forward sees.
*Item*: what the loss is averaged over (a sample, or a token). *FQN*: a parameter's name in the
user's own module, with no prefix of any wrapper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from .plan import Capabilities, Layout, Plan, Probe
from .recipe import Batch, Recipe
from .shards import Piece, Reader

__all__ = ["Driver", "Engine", "EstimatesLayout", "Outcome", "Session", "WatchesRanks", "World"]


@dataclass(frozen=True)
class World:
    """The rank of this process, of `size` processes, and its place among feeders."""

    rank: int
    size: int
    device: torch.device
    feeder_index: int
    num_feeders: int
    feeders_per_reader: int = 1
    """Each of these has a part of every sequence that their reader reads."""

    @property
    def reader_index(self) -> int:
        """Which part of the samples this rank reads."""
        return self.feeder_index // self.feeders_per_reader

    @property
    def num_readers(self) -> int:
        """In how many parts the samples of each batch are read."""
        return self.num_feeders // self.feeders_per_reader

    @property
    def leads(self) -> bool:
        """Whether this feeder is the first of its reader, of which all may have the same."""
        return self.feeder_index % self.feeders_per_reader == 0

    @property
    def counts_once(self) -> float:
        """The weight of a sum over ranks in which all ranks of a reader count the same."""
        return self.num_readers / self.size


@dataclass(frozen=True)
class Outcome:
    """The result of one update.

    `grad_norm`: the global L2 norm of the gradient, unscaled, before clipping, equal on all
    ranks; a 0-d float32 tensor on the device (law 2). `applied`: call it to learn whether the
    weights changed. It waits for this update alone and never for work queued after it; the kernel
    calls it as late as it can, so that the device stays busy.
    """

    grad_norm: Tensor
    applied: Callable[[], bool]


class Driver(Protocol):
    """A way to run, before any process exists. One instance serves the whole process."""

    @property
    def name(self) -> str:
        """The name that `--backend` takes."""
        ...

    @property
    def options_type(self) -> type:
        """A frozen dataclass: the driver's own arguments, with defaults."""
        ...

    def probe(self) -> Probe:
        """Look at this machine. Cheap; starts nothing, keeps no device."""
        ...

    def capabilities(self, plan: Plan) -> Capabilities:
        """Pure: touches no device."""
        ...

    def open(self, plan: Plan) -> AbstractContextManager[Session]:
        """Bring the process up (process group, device) and take it down again. Without a launcher
        (no WORLD_SIZE) the process is alone: one rank, also where more than one could be.

        Raises `BackendUnavailable` where `probe` says no.
        """
        ...


@runtime_checkable
class EstimatesLayout(Protocol):
    """A driver that can say how much memory a model would take; it need not."""

    def layout(
        self, plan: Plan, model: nn.Module, state_bytes: Mapping[str, int], world_size: int
    ) -> Layout:
        """The memory of `model` (its tensors may be on the meta device) on each of `world_size`
        ranks. `state_bytes`: the optimizer's state of each whole parameter by FQN. Pure."""
        ...


class Session(Protocol):
    """The process is up. Every method is called by all ranks in the same order."""

    @property
    def world(self) -> World:
        """This process among all."""
        ...

    def seed(self, value: int) -> None:
        """Seed every generator that a model or a data set on this rank may draw from."""
        ...

    def prepare(self, recipe: Recipe) -> Engine:
        """Build, place, wrap, tie, compile, and create the optimizer, in the order that this
        backend needs. `recipe.optimizer` is set. By the plan's seed all ranks build one model."""
        ...

    def feed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches with their tensors on the device, in order, none lost; to a module that
        trains, this feeder's part of their sequences. May pull one batch ahead where
        `Capabilities.feeds_ahead` says so, to overlap copying with computing. An error of `batches`
        comes through unchanged."""
        ...

    def tally(self, values: Sequence[float]) -> Callable[[], list[float]]:
        """Start to add up a few numbers over all ranks; the returned function waits for the sums.

        On the host (no device work), asynchronous, exact for integers below 2**53. This is what
        ranks agree with. The wait raises `CollectiveFailed` after the plan's timeout.
        """
        ...

    def exchange(self, value: Any) -> list[Any]:
        """Everyone's `value` (JSON types), in rank order, on every rank. Waits."""
        ...

    def reduce(self, tensor: Tensor, op: Literal["sum", "max", "min"] = "sum") -> Tensor:
        """The same shape and dtype, reduced over feeders, each counted once however many ranks it
        is; the input is left alone."""
        ...

    def gather(self, tensor: Tensor) -> Tensor:
        """All feeders' tensors one after the other along dimension 0, on the host, on every rank;
        sizes of dimension 0 may differ, the others may not."""
        ...

    def rng_state(self) -> dict[str, Tensor]:
        """The state of every generator that `seed` seeds; host tensors, by a name of yours."""
        ...

    def set_rng_state(self, state: Mapping[str, Tensor]) -> None:
        """Undo everything drawn since that `rng_state`. Raises `CheckpointDamaged`, naming the
        entry that is missing, unknown or malformed, before any generator is changed."""
        ...


class WatchesRanks(Session, Protocol):
    """The session of a driver that promises `Capabilities.stall_seconds`."""

    def watch(self, tell: Callable[[int, float, str], None]) -> None:
        """From here on `tell(rank, seconds, what)` hears, on every rank, of each that lives and
        keeps others waiting, once a step: which, for how long, and where it is and who waits in
        what, in words. It is called in another thread."""
        ...

    def give_up(self, why: str, retry: bool = True) -> bool:
        """This rank cannot go on. With `retry`: True if all say so within seconds, and may go on
        together. Else it must end; so do the others, within seconds, with `why` in their error."""
        ...


class Engine(Protocol):
    """All ranks call each method, in one order. It may have a `step`, which is like a recipe's."""

    @property
    def module(self) -> nn.Module:
        """Call this one. `train()` and `eval()` reach the user's own module.

        Each forward, in training and in evaluation, begins with rank 0's buffers on all ranks,
        whatever each has made of them (law 6), unless an option of the driver says otherwise.
        """
        ...

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's; an `lr` written before `update` governs it (law 4)."""
        ...

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters of the whole model, tied ones once; the same on all ranks."""
        ...

    @property
    def tied(self) -> tuple[tuple[str, ...], ...]:
        """Groups of FQNs that are one parameter. The first of each is the one stored."""
        ...

    def microbatch(self, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of one microbatch; `last` of its update."""
        ...

    def autocast(self) -> AbstractContextManager[Any]:
        """Around every forward, in training and in evaluation."""
        ...

    def backward(self, loss: Tensor, weight: Tensor) -> None:
        """At `update` the gradient is the sum over microbatches, and the mean over feeders, of
        that of each `weight * loss` (law 1). `weight`: 0-d, without a gradient, of the loss's dtype
        and on its device; NaN where no rank may apply the update."""
        ...

    def unused(self) -> Sequence[str]:
        """FQNs that require a gradient and got none on this rank; asked once, before an update."""
        ...

    def update(self) -> Outcome:
        """Clip, step and clear. A non-finite gradient, on any rank, leaves weights and optimizer
        state bitwise unchanged on all of them (law 3). No gradient is left (law 4).

        A parameter that no rank has a gradient of is left as it is, weight decay and moments
        included; a count of steps that the library keeps once for many parameters goes on. Where
        only some ranks have none, theirs counts as zero (law 1; see
        `Capabilities.uneven_gradients`). Raises `RecipeError`, naming the parameters, where the
        driver cannot.
        """
        ...

    def shards(self) -> Iterator[Piece]:
        """The pieces that this rank writes; over all ranks they cover each tensor exactly once.
        Weights: parameters (each tied group once) and persistent buffers: rank 0's, written by it.
        Optimizer: every tensor, number and None of the optimizer's state, and lists and tuples of
        these, tensors in at least float32; and what the optimizer itself has changed in its
        parameter groups since it was built, but for `lr`. What it keeps besides is refused by the
        kernel in the first update. State: the loss scaler, if any."""
        ...

    def restore(self, reader: Reader) -> None:
        """Take what this rank needs from a checkpoint of any driver at any world size. Raises
        `CheckpointMismatch`, naming the tensors, for one of another model or optimizer, and
        `CheckpointDamaged`, naming it, for an entry of the optimizer's state that is missing or
        malformed; both before anything is changed, weights, optimizer and loss scaler. A checkpoint
        that holds no optimizer tensors clears the optimizer: it is as when it was built. Of
        parameters that the checkpoint has no state of, it is, too."""
        ...

    def full_params(self, names: Sequence[str] | None = None) -> AbstractContextManager[nn.Module]:
        """Gives the user's own module. While it is open, the named parameters (all by default) are
        whole and readable on every rank, its buffers are rank 0's, and with all parameters the
        module can be called on one rank alone; writing to them is not supported."""
        ...
