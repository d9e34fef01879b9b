"""Records from before a process or a model exists: the plan, and what a driver can do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["Capabilities", "Layout", "Plan", "Precision", "Probe"]


@dataclass(frozen=True)
class Precision:
    """The dtypes of weights, compute and reduction; a user names one of four (`precision`).

    `params`: what the weights of the recipe's model are made in, and so what the optimizer updates
    and a checkpoint holds. `compute`: what matrix products run in, under `Engine.autocast`; what
    loses too much there (norms, softmax, losses) stays in `params`, as torch.autocast has it.
    `linear`: what linear layers that fit multiply in instead; None: `compute`. `reduce`: what
    gradients are summed in over ranks, at least. `loss_scaling`: whether the loss is scaled
    dynamically (https://arxiv.org/abs/1710.03740).

    ======  ========  ========  =========  =============  ============
    name    `params`  `reduce`  `compute`  `linear`       loss scaling
    ======  ========  ========  =========  =============  ============
    fp32    float32   float32   float32                   no
    bf16    float32   float32   bfloat16                  no
    fp16    float32   float32   float16                   yes
    float8  float32   float32   bfloat16   float8_e4m3fn  no
    ======  ========  ========  =========  =============  ============

    A driver may hold weights in fewer bits where its own options ask for that.
    """

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
    compile: bool = False
    compile_options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of `torch.compile`, such as `backend` and `mode`."""
    activation_checkpointing: tuple[str, ...] = ()
    """Class names or FQN patterns (`fnmatch`) of the submodules that recompute activations."""
    seed: int = 0
    global_batch: int = 1
    """Samples in one update, over all readers and microbatches."""
    micro_batch: int | None = None
    """At most this many samples in one forward of one reader; None: a reader's whole part."""
    timeout_seconds: float = 600.0
    """The duty of a driver of several processes that promises `Capabilities.timeout_seconds`: where
    a rank waits longer than this for others, the run ends on all ranks, by `CollectiveFailed` or
    with the process. What is said names the ranks that did not come, and none that did: also on a
    rank that comes late, and finds the others gone."""
    stall_seconds: float | None = 30.0
    """The duty of one that promises `Capabilities.stall_seconds`; None: nobody is watched. When a
    rank has waited so long in a call, one that is stopped, dead or cut off ends the run soon, and
    one that lives and is in the user's code is told of (`WatchesRanks.watch`), and waited for."""
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
    """Of all these devices together, which the ranks on this machine share; 0 when unknown."""
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
    samples where there are too few and weighing their loss less."""
    uneven_gradients: bool = True
    """In one update, some ranks may have a gradient of a parameter and others none (law 1). Without
    it all must use the same layers, in order; where they do not, the run ends before an update or a
    save of theirs, by an error that names the layers: the driver's duty (law 1)."""
    timeout_seconds: bool = False
    """It does the duty of `Plan.timeout_seconds`. Where there are several ranks, another value than
    the default is refused without it; of the default the kernel says that nobody keeps it."""
    stall_seconds: bool = False
    """The same of `Plan.stall_seconds`, and its sessions are `WatchesRanks`."""
    multiple_of_ranks: int = 1
    """It runs in a multiple of so many ranks."""
    exact_resume: bool = True
    """Resuming on the same driver and world size is bit-exact."""
    why_not: Mapping[str, str] = field(default_factory=dict)
    """By the name of a precision that is not promised: what it lacks, and what to do. By
    `multiple_of_ranks`: with which options."""
    saves_memory: str = ""
    """What a user could set to need less memory, for the message when there is none left."""


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
    """What is gathered or cast for a while: the largest unit of a sharded model, say."""
    units: tuple[str, ...] = ()
    """FQNs of the submodules that are wrapped, each gathered as one; none in a plain module."""
    notes: tuple[str, ...] = ()
    """What else a user should know: what is tied, cast, or not counted here."""
