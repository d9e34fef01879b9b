"""Records that the kernel and a driver exchange: plan, promises, place among ranks, outcome."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["Capabilities", "Layout", "Outcome", "Parts", "Plan", "Precision", "Probe", "World"]

Parts = Mapping[str, tuple[Tensor, Hashable]]
"""By FQN: the elements that this rank holds of a weight, and a key that says which these are. Two
weights have the same key if the rank holds the same elements of both."""


@dataclass(frozen=True)
class Precision:
    """The dtypes of weights, compute and reduction; a user names one of four (`precision`).

    `params`: what the weights of the recipe's model are made in, and so what the optimizer updates
    and a checkpoint holds. `compute`: what matrix products run in, under `Engine.autocast`.
    Operations that lose too much in it (norms, softmax, losses) stay in `params`, as under
    torch.autocast. `linear`: what linear layers that fit multiply in instead; None: `compute`.
    `reduce`: what gradients are summed in over ranks, at least. `loss_scaling`: whether the loss is
    scaled dynamically (https://arxiv.org/abs/1710.03740).

    ======  ========  ========  =========  =============  ============
    name    `params`  `reduce`  `compute`  `linear`       loss scaling
    ======  ========  ========  =========  =============  ============
    fp32    float32   float32   float32                   no
    bf16    float32   float32   bfloat16                  no
    fp16    float32   float32   float16                   yes
    float8  float32   float32   bfloat16   float8_e4m3fn  no
    ======  ========  ========  =========  =============  ============

    A driver may hold weights in fewer bits where its own options ask for that."""

    name: str = "fp32"
    params: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32
    linear: torch.dtype | None = None
    reduce: torch.dtype = torch.float32
    loss_scaling: bool = False


@dataclass(frozen=True)
class Plan:
    """Everything a driver needs to know before a process group or a model exists."""

    precision: Precision = Precision()
    max_grad_norm: float | None = None
    """The limit of the global gradient norm; None never clips, and reports it all the same."""
    max_grad_value: float | None = None
    """The limit of each element of the complete gradient, unscaled and clipped by its norm already.
    A driver that promises `Capabilities.max_grad_value` keeps it; None: no limit."""
    compile: bool = False
    compile_options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of `torch.compile`, such as `backend` and `mode`."""
    activation_checkpointing: tuple[str, ...] = ()
    """Class names or FQN patterns (`fnmatch`) of the submodules that recompute activations."""
    seed: int = 0
    global_batch: int = 1
    """Samples in one update, over all readers and microbatches; the last one of an epoch may have
    fewer, and those at the beginning of a run, where the batch grows."""
    micro_batch: int | None = None
    """At most this many samples in one forward of one reader; None: a reader's whole part."""
    timeout_seconds: float = 600.0
    """Longest time that a rank waits for others, on a driver of several processes that promises
    `Capabilities.timeout_seconds`. After this time the run ends on all ranks, by `CollectiveFailed`
    or with the process. The message names the ranks that did not arrive, and no rank that did. This
    also holds on a rank that arrives late, after the others have ended."""
    stall_seconds: float | None = 30.0
    """Time after which ranks that keep others waiting are looked for, on a driver that promises
    `Capabilities.stall_seconds`; None: never. When a rank has waited this long in a call, a rank
    that is stopped, dead or cut off ends the run soon. A rank that is alive and in the user's code
    is reported (`WatchesRanks.watch`), and waited for."""
    options: Any = None
    """An instance of the driver's own `options_type`."""


@dataclass(frozen=True)
class Probe:
    """The answer of a driver: can it run on this machine?"""

    usable: bool
    reason: str = ""
    """Why not, or what it would run on; one line."""
    install: str = ""
    """The command that installs what is missing; empty when nothing is."""
    versions: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    memory_bytes: int = 0
    """Memory of all these devices together, shared by the ranks of this machine; 0 when unknown."""
    preference: int = 0
    """`auto` takes the usable driver with the highest preference."""


@dataclass(frozen=True)
class Capabilities:
    """The promises of a driver under a plan. The kernel refuses what is not promised, and the
    conformance suite proves what is, and that a trait which is measured is declared (law 7)."""

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
    samples if there are too few, with less weight on their loss."""
    costly_reads: bool = False
    """Reading weights or gradients between steps compiles programs, or copies to the host."""
    uneven_gradients: bool = True
    """In one update, some ranks may have a gradient of a parameter and others none (law 1). Without
    it all must use the same layers, in the same order. If they do not, the driver must end the run,
    before such an update or a save of it, by an error that names the layers (law 1)."""
    timeout_seconds: bool = False
    """The driver keeps `Plan.timeout_seconds`. Without this promise a run of several ranks refuses
    values other than the default, and warns that the default is not kept."""
    stall_seconds: bool = False
    """The driver keeps `Plan.stall_seconds`, in this sense; its sessions are `WatchesRanks`."""
    max_grad_value: bool = False
    """The driver limits each element of the gradient (`Plan.max_grad_value`)."""
    multiple_of_ranks: int = 1
    """The number of ranks must be a multiple of this."""
    even_blocks: bool = False
    """Each of a model's equal blocks, from the third on, adds the same to what a step needs."""
    exact_resume: bool = True
    """Resuming on the same driver and world size is bit-exact."""
    why_not: Mapping[str, str] = field(default_factory=dict)
    """By the name of a precision that is not promised: what it lacks, and what to do. By
    `multiple_of_ranks`: with which options."""
    saves_memory: str = ""
    """Settings that need less memory; named in the message when memory runs out."""


@dataclass(frozen=True)
class Layout:
    """The bytes that a model would take in the memory of one rank, the fullest."""

    parameter_bytes: int
    """Weights as the module holds them between steps, and buffers."""
    gradient_bytes: int
    """At their most, just before the update."""
    optimizer_bytes: int
    """The optimizer's state, and float32 master copies where they lie beside the weights."""
    transient_bytes: int = 0
    """Bytes that are gathered or cast for a while: the largest unit of a sharded model, say."""
    units: tuple[str, ...] = ()
    """FQNs of the submodules that are wrapped, each gathered as one; none in a plain module."""
    notes: tuple[str, ...] = ()
    """Remarks for the user: weights that are tied, cast, or not counted here."""


@dataclass(frozen=True)
class World:
    """The rank of this process, of `size` processes, and its place among feeders."""

    rank: int
    size: int
    device: torch.device
    feeder_index: int
    num_feeders: int
    feeders_per_reader: int = 1
    """Feeders of one reader; each has a part of every sequence that the reader reads."""
    sums_on: torch.device | None = None
    """Device for float64, where this rank's own has none. None: the own."""

    def widened(self, value: torch.Tensor) -> torch.Tensor:
        """Return a value in float64, on a device that has it."""
        return value.to(self.sums_on or value.device).double()

    @property
    def reader_index(self) -> int:
        """Index of the part of the samples that this rank reads."""
        return self.feeder_index // self.feeders_per_reader

    @property
    def num_readers(self) -> int:
        """Number of parts in which the samples of each batch are read."""
        return self.num_feeders // self.feeders_per_reader

    @property
    def is_first_of_reader(self) -> bool:
        """True for the first feeder of its reader. All feeders of a reader may have the same
        samples, and then only this one counts them."""
        return self.feeder_index % self.feeders_per_reader == 0

    @property
    def replicated_sum_weight(self) -> float:
        """The weight of a sum over ranks to which all ranks of a reader add the same number. With
        this weight the number of each reader counts once."""
        return self.num_readers / self.size

    def __getattr__(self, name: str) -> Any:
        """Return the value of a former name."""
        if (now := _FORMER_NAMES.get(name)) is None:
            raise AttributeError(f"World has no {name}")
        warnings.warn(f"World.{name} is now World.{now}", DeprecationWarning, stacklevel=2)
        return getattr(self, now)


_FORMER_NAMES = {"leads": "is_first_of_reader", "counts_once": "replicated_sum_weight"}


@dataclass(frozen=True)
class Outcome:
    """The result of one update.

    `grad_norm`: the global L2 norm of the gradient, unscaled, before clipping, equal on all
    ranks; a 0-d float32 tensor on the device (law 2). `applied`: call it to learn whether the
    weights changed. It waits for this update alone and never for work queued after it; the kernel
    calls it as late as it can, so that the device stays busy."""

    grad_norm: Tensor
    applied: Callable[[], bool]
