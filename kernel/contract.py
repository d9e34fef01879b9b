"""The contract between what to train, when, and where.

A `Recipe` says *what* to train, the kernel decides *when* and *how much*, a driver says *where*
and *how*. A driver is three objects, one for each stage of a process's life:

=========  ============================  ====================================================
`Driver`   no process group exists yet   what it is called, what it can do, whether it runs here
`Session`  the process is up             device, communication, random state, feeding
`Engine`   the model is wrapped          the step, evaluate and save contracts
=========  ============================  ====================================================

These three are mandatory; `optional` has what a driver may offer besides.

This file holds types and docstrings and no logic. The laws that a driver must keep are proved by
the conformance suite; each docstring names the law it belongs to.

Terms. *Rank*: one process. *Feeder*: the ranks that compute one loss together, mostly one rank
(under single-program multi-data it serves many devices); ranks that partition a layer are one
feeder. *Reader*: the feeders that share their samples, mostly one; several where sequences are
partitioned over them. *Global batch*: the samples of one update. *Microbatch*: the samples of one
forward. *Item*: the unit that the loss is averaged over (a sample, or a token). *FQN*: a
parameter's name in the user's own module, with no prefix of any wrapper."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

from torch import Tensor, nn

from .plan import Capabilities, Outcome, Plan, Probe, World
from .recipe import Batch, Recipe
from .shards import Piece, Reader

__all__ = ["Driver", "Engine", "Outcome", "Session", "World"]


class Driver(Protocol):
    """A way to run, before any process exists. One instance serves the whole process."""

    @property
    def name(self) -> str:
        """The name that `--backend` takes."""

    @property
    def options_type(self) -> type:
        """A frozen dataclass: the driver's own arguments, with defaults."""

    def probe(self) -> Probe:
        """Look at this machine. Cheap; starts nothing, keeps no device."""

    def capabilities(self, plan: Plan) -> Capabilities:
        """Pure: touches no device."""

    def open(self, plan: Plan) -> AbstractContextManager[Session]:
        """Bring the process up (process group, device) and take it down again. Without a launcher
        (no WORLD_SIZE) the process is alone: one rank, also where more than one could be.

        Raises `BackendUnavailable` where `probe` says no."""


class Session(Protocol):
    """The process is up. Every method is called by all ranks in the same order."""

    @property
    def world(self) -> World:
        """This process among all."""

    def seed(self, value: int) -> None:
        """Seed every generator that a model or a data set on this rank may draw from."""

    def prepare(self, recipe: Recipe) -> Engine:
        """Build, place, wrap, tie, compile, and create the optimizer, in the order that this
        backend needs. `recipe.optimizer` is set. By the plan's seed all ranks build one model."""

    def feed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches with their tensors on the device, in order, none lost; to a module that
        trains, this feeder's part of their sequences. May pull one batch ahead where
        `Capabilities.feeds_ahead` is true, while the device computes. Errors of `batches` pass."""

    def tally(self, values: Sequence[float]) -> Callable[[], list[float]]:
        """Start to add up a few numbers over all ranks; the returned function waits for the sums.

        On the host (no device work), asynchronous, exact for integers below 2**53. This is what
        ranks agree with. The wait raises `CollectiveFailed` after the plan's timeout."""

    def exchange(self, value: Any) -> list[Any]:
        """Everyone's `value` (JSON types), in rank order, on every rank. Waits."""

    def reduce(self, tensor: Tensor, op: Literal["sum", "max", "min"] = "sum") -> Tensor:
        """A new tensor of this shape and dtype, reduced over feeders, each counted once."""

    def gather(self, tensor: Tensor) -> Tensor:
        """All feeders' tensors one after the other along dimension 0, on the host, on every rank;
        sizes of dimension 0 may differ, the others may not."""

    def rng_state(self) -> dict[str, Tensor]:
        """The state of every generator that `seed` seeds; host tensors, by a name of yours."""

    def set_rng_state(self, state: Mapping[str, Tensor]) -> None:
        """Undo everything drawn since that `rng_state`. Raises `CheckpointDamaged`, naming the
        entry that is missing, unknown or malformed, before any generator is changed."""


class Engine(Protocol):
    """The wrapped model. All ranks call each method, in one order."""

    @property
    def module(self) -> nn.Module:
        """Call this one. `train()` and `eval()` reach the user's own module.

        Each forward, in training and in evaluation, begins with rank 0's buffers on all ranks,
        whatever each has made of them (law 6), unless an option of the driver says otherwise."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's; an `lr` written before `update` governs it (law 4)."""

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters of the whole model, tied ones once; the same on all ranks."""

    @property
    def tied(self) -> tuple[tuple[str, ...], ...]:
        """Groups of FQNs that are one parameter. The first of each is the one stored."""

    def microbatch(self, last: bool) -> AbstractContextManager[Any]:
        """Enclose forward and backward of one microbatch; `last` of its update."""

    def autocast(self) -> AbstractContextManager[Any]:
        """Enclose every forward, in training and in evaluation."""

    def backward(self, loss: Tensor, weight: Tensor) -> None:
        """At `update` the gradient is the sum over microbatches, and the mean over feeders, of
        that of each `weight * loss` (law 1). `weight`: 0-d, without a gradient, of the loss's dtype
        and on its device; NaN where no rank may apply the update."""

    def unused(self) -> Sequence[str]:
        """FQNs that require a gradient and got none on this rank; asked once, before an update."""

    def update(self) -> Outcome:
        """Clip, step and clear. A non-finite gradient, on any rank, leaves weights and optimizer
        state bitwise unchanged on all of them (law 3). No gradient is left (law 4).

        A parameter that no rank has a gradient of is left as it is, weight decay and moments
        included; a count of steps that the library keeps once for many parameters still increases.
        Where only some ranks have none, theirs counts as zero (law 1; see
        `Capabilities.uneven_gradients`). Raises `RecipeError`, naming them, if it cannot."""

    def shards(self) -> Iterator[Piece]:
        """The pieces that this rank writes; over all ranks they cover each tensor exactly once.
        Weights: parameters (each tied group once) and persistent buffers: rank 0's, written by it.
        Optimizer: every tensor, number and None of the optimizer's state, and lists and tuples of
        these, tensors in at least float32; and what the optimizer itself has changed in its
        parameter groups since it was built, but for `lr`. What it keeps besides is refused by the
        kernel in the first update. State: the loss scaler, if any, and of modules what
        `checkpoint.extra_state` names: rank 0's, and of other ranks what differs from it."""

    def restore(self, reader: Reader) -> None:
        """Take what this rank needs from a checkpoint of any driver at any world size. A checkpoint
        that holds no optimizer tensors clears the optimizer: it is as when it was built. Of
        parameters that the checkpoint has no state of, it is, too. A module's missing state stays.

        Raises:
            CheckpointMismatch: It is of another model or optimizer. Names the tensors.
            CheckpointDamaged: An entry of the optimizer's or a module's state, which is named, is
                missing or malformed. After both, all state is as it was."""

    def full_params(self, names: Sequence[str] | None = None) -> AbstractContextManager[nn.Module]:
        """Gives the user's own module. While it is open, the named parameters (all by default) are
        whole and readable on every rank, its buffers are rank 0's, and with all parameters the
        module can be called on one rank alone; writing to them is not supported."""
