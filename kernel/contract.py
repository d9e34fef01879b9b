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

Words. *Rank*: one process. *Feeder*: a process that brings its own part of each batch; under
single-program multi-data one feeder serves many devices. *Global batch*: the samples of one
update. *Microbatch*: what one forward sees. *Item*: what the loss is averaged over (a sample, or
a token). *FQN*: a parameter's name in the user's own module, with no prefix of any wrapper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

__all__ = [
    "Batch",
    "Box",
    "Capabilities",
    "Driver",
    "Engine",
    "Flat",
    "Kind",
    "Layout",
    "Microstep",
    "Outcome",
    "Piece",
    "Plan",
    "Precision",
    "Probe",
    "Reader",
    "Recipe",
    "Region",
    "Session",
    "TensorInfo",
    "World",
]

Batch = Any
"""What the collate function returns: a tensor, or a dict, list or tuple of batches."""


# --- what to train --------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """What to train. Factories, not objects: the driver decides when and where each is built.

    Only `model` and `loss` are needed to step; `train_data` to fit.
    """

    model: Callable[[], nn.Module]
    """Builds the model, on the CPU or on the meta device; called once on every rank, with the
    same random seed."""

    loss: Callable[[nn.Module, Batch], Tensor]
    """`loss(module, batch)`: the SUM of the loss over the items of the batch, a scalar. Call the
    `module` that is passed (it is wrapped), not one kept aside."""

    train_data: Any = None
    """A map-style data set: `__len__` and `__getitem__` (or `__getitems__`, used when there); a
    stream: an iterable of samples, or a function without arguments that makes one for each epoch;
    or ready `Batches` of a loader of your own."""

    lengths: Sequence[int] | None = None
    """Of each sample of `train_data` (tokens, say), for the setting `data.by_length`."""

    eval_data: Mapping[str, Any] = field(default_factory=dict)
    """Named data, of any of these kinds, that the model does not train on."""

    collate: Callable[[list[Any]], Batch] | None = None
    """Makes a batch of a list of samples; by default `torch.utils.data.default_collate`."""

    count_items: Callable[[Batch], int] | None = None
    """The number of items in a batch, on the host, before it is moved; by default one item a
    sample. The global sum of it divides the loss."""

    optimizer: Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer] | None = None
    """Builds the optimizer from (FQN, parameter) pairs; by default the one in the settings."""

    measure: Callable[[nn.Module, Batch], Mapping[str, Tensor]] | None = None
    """What evaluation adds up: named tensors, each a SUM over the batch, so that sums of batches
    and of ranks are exact. By default `{"loss": loss(module, batch)}`; `"items"` and `"samples"`
    are added by the kernel."""

    summarise: Callable[[Mapping[str, Tensor]], Mapping[str, float]] | None = None
    """Turns the sums over the whole data set (float64, on the host) into metrics; by default
    `{"loss": loss / items}`."""

    step: Callable[[nn.Module, Batch, Microstep], Tensor] | None = None
    """Takes over forward and backward of a microbatch, for a loss that is normalised in another
    way: `step(module, batch, microstep)` calls `microstep.backward` and returns the detached loss
    to report. What is given to `backward` is summed over microbatches and averaged over feeders.
    """

    flops_per_item: float | None = None
    """Floating point operations that training spends on one item (forward and backward), to
    report the share of the machine's peak; None reports nothing."""


class Microstep(Protocol):
    """One microbatch of an update, as `Recipe.step` sees it."""

    @property
    def index(self) -> int:
        """From 0."""
        ...

    @property
    def num_microbatches(self) -> int:
        """Of this update; the same on every feeder."""
        ...

    @property
    def last(self) -> bool:
        """Whether the update follows."""
        ...

    def num_items(self) -> float:
        """Items of the global batch. The first call of an update waits for the other ranks."""
        ...

    def autocast(self) -> AbstractContextManager[Any]:
        """Around the forward."""
        ...

    def backward(self, loss: Tensor, weight: float = 1.0) -> Tensor:
        """Adds the gradient of `weight * loss`, a scalar; returns it detached, and 0 for a
        microbatch that only keeps its feeder in step with the others.
        """
        ...


# --- how the run is planned -----------------------------------------------------------------


@dataclass(frozen=True)
class Precision:
    """Where each dtype is used; `kernel.settings.PRECISIONS` holds the three that a user may name.

    `params`: what the weights of the recipe's model are made in, and so what the optimizer updates
    and a checkpoint holds. `compute`: what matrix products run in, under `Engine.autocast`; what
    loses too much there (norms, softmax, losses) stays in `params`, as torch.autocast has it.
    `reduce`: what gradients are summed in over ranks, at least. `loss_scaling`: whether the loss is
    scaled dynamically (https://arxiv.org/abs/1710.03740).

    ======  ============  ============  ============  ============
    name    `params`      `reduce`      `compute`     loss scaling
    ======  ============  ============  ============  ============
    fp32    float32       float32       float32       no
    bf16    float32       float32       bfloat16      no
    fp16    float32       float32       float16       yes
    ======  ============  ============  ============  ============

    A driver may hold weights in fewer bits where its own options ask for that.
    """

    name: str = "fp32"
    params: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32
    loss_scaling: bool = False


@dataclass(frozen=True)
class Plan:
    """Everything a driver needs to know before a process group or a model exists."""

    precision: Precision = Precision()
    max_grad_norm: float | None = None
    """The limit of the global gradient norm; None never clips, and reports it all the same."""
    compile: bool = False
    compile_options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of `torch.compile`, such as `backend` and `mode`."""
    activation_checkpointing: tuple[str, ...] = ()
    """Class names or FQN patterns (`fnmatch`) of the submodules that recompute activations."""
    seed: int = 0
    global_batch: int = 1
    """Samples in one update, over all feeders and microbatches."""
    micro_batch: int | None = None
    """At most this many samples in one forward of one feeder; None: a feeder's whole part."""
    timeout_seconds: float = 600.0
    """The duty of a driver of several processes that promises `Capabilities.timeout_seconds`: where
    a rank waits longer than this for others, the run ends on all ranks, by `CollectiveFailed` or
    with the process. What is said names the ranks that did not come, and none that did: also on a
    rank that comes late, and finds the others gone."""
    stall_seconds: float | None = 30.0
    """The duty of one that promises `Capabilities.stall_seconds`; None: nobody is watched. When a
    rank has waited so long in a call, one that is stopped, dead or cut off ends the run soon, and
    one that lives and is in the user's code is told of (`Session.watch`), and waited for."""
    options: Any = None
    """An instance of the driver's own `options_type`."""


@dataclass(frozen=True)
class World:
    """Who this process is."""

    rank: int
    size: int
    """Processes in the run."""
    device: torch.device
    feeder_index: int
    num_feeders: int


@dataclass(frozen=True)
class Probe:
    """Whether a driver can run on this machine."""

    usable: bool
    reason: str = ""
    """Why not, or what it would run on; one line."""
    install: str = ""
    """The command that installs what is missing; empty when nothing is."""
    versions: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    memory_bytes: int = 0
    """Of all these devices together, which the ranks on this machine share; 0 when unknown."""
    preference: int = 0
    """`auto` takes the usable driver with the highest preference."""


@dataclass(frozen=True)
class Capabilities:
    """What a driver promises under a plan. The kernel refuses what is not promised, and the
    conformance suite proves what is, and that a trait which is measured is declared (law 7).
    """

    precisions: frozenset[str]
    """Names of the `Precision`s it trains in."""
    multi_process: bool
    """More than one rank can train one model."""
    sharded: bool
    """A rank holds only a part of the weights: read whole ones through `full_params`."""
    compile: bool
    activation_checkpointing: bool
    feeds_ahead: bool
    """`Session.feed` pulls a batch before the one in use is done with."""
    static_shapes: bool = False
    """Each new batch shape costs a compilation: the kernel gives all batches one size, by repeating
    samples where there are too few and weighing their loss less.
    """
    uneven_gradients: bool = True
    """In one update, some ranks may have a gradient of a parameter and others none (law 1). Without
    it all ranks must use the same parameters: the library adds up what each has, in its order.
    """
    timeout_seconds: bool = False
    """It does the duty of `Plan.timeout_seconds`. Where there are several ranks, another value than
    the default is refused without it; of the default the kernel says that nobody keeps it."""
    stall_seconds: bool = False
    """The same of `Plan.stall_seconds`, and its sessions have `watch`."""
    exact_resume: bool = True
    """Resuming on the same driver and world size is bit-exact."""
    saves_memory: str = ""
    """What a user could set to need less memory, for the message when there is none left."""


@dataclass(frozen=True)
class Layout:
    """How a model would lie in the memory of one rank, the fullest, in bytes."""

    parameter_bytes: int
    """Weights as the module holds them between steps, and buffers."""
    gradient_bytes: int
    """At their most, just before the update."""
    optimizer_bytes: int
    """The optimizer's state, and float32 master copies where they lie beside the weights."""
    transient_bytes: int = 0
    """What is gathered or cast for a while: the largest unit of a sharded model, say."""
    units: tuple[str, ...] = ()
    """FQNs of the submodules that are wrapped, each gathered as one; none in a plain module."""
    notes: tuple[str, ...] = ()
    """What else a user should know: what is tied, cast, or not counted here."""


# --- what a checkpoint is made of -----------------------------------------------------------

Kind = Literal["weights", "optimizer", "state"]


@dataclass(frozen=True)
class Box:
    """An axis-aligned part of a tensor: `offsets[d] <= index[d] < offsets[d] + sizes[d]`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Flat:
    """The elements `start <= i < stop` of a tensor that is laid out row after row."""

    start: int
    stop: int


Region = Box | Flat


@dataclass(frozen=True)
class Piece:
    """A part of a tensor that one rank writes.

    `name`: an FQN (weights), `<fqn>/<state>` (optimizer) or a free name (state; a loss scaler has
    `loss_scale` and `loss_scale_good_steps`). `kernel.optimizer_state` says how numbers, lists and
    what an optimizer counts in its groups are named. `tensor`: the part, on any device; a box keeps
    its sizes, a flat range is one-dimensional. `shape`: of the whole tensor. `region`: which part;
    None is all of it.
    """

    kind: Kind
    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    region: Region | None = None


@dataclass(frozen=True)
class TensorInfo:
    """What a checkpoint knows of a tensor without reading it."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class Reader(Protocol):
    """Reads any region of any tensor of a checkpoint, whoever wrote it and however it was cut."""

    def names(self, kind: Kind) -> Sequence[str]:
        """All names of that kind, sorted."""
        ...

    def info(self, kind: Kind, name: str) -> TensorInfo:
        """The dtype and global shape. Raises `CheckpointMismatch` when there is no such tensor."""
        ...

    def read(
        self, kind: Kind, name: str, region: Region | None = None, out: Tensor | None = None
    ) -> Tensor:
        """A CPU tensor with the stored dtype: the whole (global shape), a box (its sizes) or a
        flat range (one-dimensional). A new one, or `out`: a contiguous one of that dtype and shape,
        which is then written to. Raises `CheckpointMismatch` for an unknown name, a region outside
        the tensor, or another `out`; `CheckpointDamaged` when stored pieces leave a gap.
        """
        ...


# --- the driver -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What one update came to.

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
        """What `--backend` takes."""
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

    def layout(
        self, plan: Plan, model: nn.Module, state_bytes: Mapping[str, int], world_size: int
    ) -> Layout:
        """What `model` (its tensors may be on the meta device) would take on each of `world_size`
        ranks. `state_bytes`: the optimizer's state of each whole parameter by FQN. Pure.
        """
        ...

    def open(self, plan: Plan) -> AbstractContextManager[Session]:
        """Bring the process up (process group, device) and take it down again. Without a launcher
        (no WORLD_SIZE) the process is alone: one rank, also where more than one could be.

        Raises `BackendUnavailable` where `probe` says no.
        """
        ...


class Session(Protocol):
    """The process is up. Every method is called by all ranks in the same order."""

    @property
    def world(self) -> World:
        """Who this process is."""
        ...

    def watch(self, tell: Callable[[int, float, str], None]) -> None:
        """From here on `tell(rank, seconds, what)` hears, on every rank, of each that lives and
        keeps others waiting, once a step: which, for how long, and where it is and who waits in
        what, in words. It is called in another thread. Only where `Capabilities.stall_seconds` is
        promised; a driver that does not need not have it.
        """
        ...

    def seed(self, value: int) -> None:
        """Seed every generator that a model or a data set on this rank may draw from."""
        ...

    def prepare(self, recipe: Recipe) -> Engine:
        """Build, place, wrap, tie, compile, and create the optimizer, in the order that this
        backend needs. `recipe.optimizer` is set. The model is built under the plan's seed, the
        same on all ranks.
        """
        ...

    def feed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches with their tensors on the device, in order, none lost. May pull one
        batch ahead where `Capabilities.feeds_ahead` says so, to overlap copying with computing.
        An error of `batches` comes through unchanged.
        """
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
        """The same shape and dtype, reduced over feeders; the input is left alone."""
        ...

    def gather(self, tensor: Tensor) -> Tensor:
        """All feeders' tensors one after the other along dimension 0, on the host, on every rank;
        sizes of dimension 0 may differ, the others may not.
        """
        ...

    def rng_state(self) -> dict[str, Tensor]:
        """The state of every generator that `seed` seeds; host tensors, by a name of the driver's
        choice.
        """
        ...

    def set_rng_state(self, state: Mapping[str, Tensor]) -> None:
        """Undo everything drawn since that `rng_state`. Raises `CheckpointDamaged`, naming the
        entry that is missing, unknown or malformed, before any generator is changed.
        """
        ...


class Engine(Protocol):
    """The model is wrapped. Every method is called by all ranks in the same order."""

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
        and on its device; NaN where no rank may apply the update.
        """
        ...

    def unused(self) -> Sequence[str]:
        """FQNs of parameters that require a gradient and got none on this rank. Called at most
        once, right before the first update.
        """
        ...

    def update(self) -> Outcome:
        """Clip, step and clear. A non-finite gradient, on any rank, leaves weights and optimizer
        state bitwise unchanged on all of them (law 3). No gradient is left (law 4).

        A parameter that no rank has a gradient of is left as it is, weight decay and moments
        included; where only some ranks have none, theirs counts as zero (law 1). Raises
        `RecipeError`, naming the parameters, where the driver cannot.
        """
        ...

    def shards(self) -> Iterator[Piece]:
        """The pieces that this rank writes; over all ranks they cover each tensor exactly once.
        Weights: parameters (each tied group once) and persistent buffers: rank 0's, written by it.
        Optimizer: every tensor, number and None of the optimizer's state, and lists and tuples of
        these, tensors in at least float32; and what the optimizer itself has changed in its
        parameter groups since it was built, but for `lr`. What it keeps besides is refused by the
        kernel in the first update. State: the loss scaler, if any.
        """
        ...

    def restore(self, reader: Reader) -> None:
        """Take what this rank needs from a checkpoint of any driver at any world size. Raises
        `CheckpointMismatch`, naming the tensors, for one of another model or optimizer, and
        `CheckpointDamaged`, naming it, for an entry of the optimizer's state that is missing or
        malformed; both before anything is changed, weights, optimizer and loss scaler. A checkpoint
        that holds no optimizer tensors clears the optimizer: it is as when it was built. Of
        parameters that the checkpoint has no state of, it is, too.
        """
        ...

    def full_params(self, names: Sequence[str] | None = None) -> AbstractContextManager[nn.Module]:
        """Gives the user's own module. While it is open, the named parameters (all by default) are
        whole and readable on every rank, its buffers are rank 0's, and with all parameters the
        module can be called on one rank alone; writing to them is not supported.
        """
        ...
