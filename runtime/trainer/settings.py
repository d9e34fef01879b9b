"""Settings: what a user may set, with defaults.

Settings are nested frozen dataclasses. `override` takes dotted keys (`optimizer.lr`) and texts or
values, and refuses unknown keys and values of a wrong type by name.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ..kernel.errors import SettingError
from ..kernel.plan import Plan, Precision
from ..kernel.ranges import LARGEST, check_range, most_at_once, short
from .optimizers import OptimizerGroup, OptimizerSettings
from .schedule import build_schedule
from .setting_values import check_types, flatten

__all__ = [
    "PRECISIONS",
    "AverageSettings",
    "CheckpointSettings",
    "DataSettings",
    "EvaluateSettings",
    "OptimizerGroup",
    "OptimizerSettings",
    "ResumeSettings",
    "ScheduleSettings",
    "Settings",
    "SpikeSettings",
]

PRECISIONS = {
    "fp32": Precision("fp32"),
    "bf16": Precision("bf16", compute=torch.bfloat16),
    "fp16": Precision("fp16", compute=torch.float16, loss_scaling=True),
    "float8": Precision("float8", compute=torch.bfloat16, linear=torch.float8_e4m3fn),
}
"""Mixed precision by name: weights and reductions stay float32."""

LARGEST_SEED = 2**63 - 1
"""torch takes twice that; ranks and steps are added to it."""
LONGEST_SECONDS = 10**9
"""Communication libraries count nanoseconds in 63 bits, which is ten times as long."""


@dataclass(frozen=True)
class ScheduleSettings:
    """See `build_schedule`."""

    name: str = "cosine"
    warmup: float = 0.0
    final: float = 0.1
    decay: float = 0.2


@dataclass(frozen=True)
class AverageSettings:
    """An exponential moving average of the weights, beside them: float32, cut as they are, saved
    and resumed with them. As torch.optim.swa_utils makes it."""

    decay: float | None = None
    """The share of the average that stays when it is moved to the weights, such as 0.999.
    None keeps no average."""
    every: int = 1
    """Updates between movings."""
    start: int = 0
    """Updates before the first, at which the average is the weights."""


@dataclass(frozen=True)
class DataSettings:
    """The order of samples, and how they are fetched."""

    shuffle: bool | None = None
    """None: shuffled where samples can be fetched by index; other data come in their own order."""
    by_length: int | None = None
    """Train samples of similar length together, to pad less: `Recipe.lengths` are sorted in
    stretches of so many steps of the shuffled order (50 is usual). None keeps that order."""
    drop_last: bool = False
    workers: int = 0
    """Processes that fetch microbatches; 0 fetches in the training process."""


@dataclass(frozen=True)
class EvaluateSettings:
    """When to go through the evaluation data."""

    every: int | None = None
    """Steps between evaluations; None only at the end."""
    at_end: bool = True
    micro_batch: int | None = None
    """Samples in one forward; the training one by default."""
    weights: Literal["present", "average"] = "present"
    """`average`: of the weights (see `average.decay`), once there is one."""


@dataclass(frozen=True)
class CheckpointSettings:
    """When to save, and what to keep."""

    every: int | None = None
    """Steps between checkpoints; None only at the end."""
    at_end: bool = True
    keep_last: int = 2
    keep_best: int = 1
    """Keep this many with the best `best_metric` besides."""
    best_metric: str = "loss"
    best_mode: Literal["min", "max"] = "min"
    keep_every: int | None = None
    """Checkpoints of steps divisible by this are kept for ever."""
    behind: bool = False
    """Save while training goes on: it stands still for one copy into host memory, as large as what
    a rank saves and used again by the next save. The checkpoint of the end is waited for."""
    link_frozen: bool = False
    """Do not write weights that do not learn (`drivetrain.lora`) again in each checkpoint: they lie
    in files of their own, and a save that finds them unchanged, by their checksum, links to the
    file of an earlier checkpoint. Two checkpoints that follow each other share none, so the first
    two are written. A tool that changes such a file in place changes several checkpoints."""
    verify: bool = True
    """Before resuming, read all that is resumed from and compare its checksums, each rank a part.
    A checkpoint that is not as it was written is left out for the one before it, and kept."""
    stop_on_error: bool = False
    """End the run when a checkpoint cannot be written, instead of going on with the last one."""


@dataclass(frozen=True)
class ResumeSettings:
    """What a resumed run takes from a checkpoint besides weights and progress."""

    optimizer: Literal["keep", "fresh"] = "keep"
    """`keep`: the optimizer's state; what another optimizer, or other options of it, had kept is
    refused. `fresh`: it starts anew, in a run that begins with this setting or another optimizer;
    from then on, when that run is resumed, it is kept."""


@dataclass(frozen=True)
class SpikeSettings:
    """Watching for steps whose loss is far above the usual one.

    They are looked for where the loss is logged, and before a checkpoint is saved, so that none is
    saved after one. Going back, and leaving their data out, is what Chowdhery et al. did
    (https://arxiv.org/abs/2204.02311, section 5.1).
    """

    factor: float | None = None
    """A loss above the median of the last `history` ones by this many typical deviations (1.4826
    times the median absolute one, which is the standard deviation of a normal distribution) is a
    spike; 6 is a good start. None does not watch. Of updates that take turns, each is compared with
    those of its own turn."""
    history: int = 100
    """Steps; the first 20 of a run are not judged."""
    roll_back: bool = False
    """Go back to the newest checkpoint, and leave out the samples of these steps and those of the
    step before, whose update may be the cause. Without it a spike is told, and training goes on."""
    max_roll_backs: int = 3
    """A spike after so many ends the run."""


@dataclass(frozen=True)
class Settings:
    """A whole run, apart from what to train (the recipe) and where (the backend)."""

    steps: int | None = None
    """Updates in all; by default `epochs` decides."""
    epochs: float = 1.0
    global_batch: int = 32
    """Samples in one update, over all ranks; independent of the world size."""
    micro_batch: int | None = None
    """At most this many samples in one forward on one rank; accumulation follows from it."""
    precision: str = "fp32"
    max_grad_norm: float | None = 1.0
    seed: int = 0
    """From -2**63 to 2**63 - 1."""
    compile: bool = False
    compile_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of `torch.compile`: `backend`, `mode` and so on."""
    activation_checkpointing: tuple[str, ...] = ()
    log_every: int = 10
    max_nonfinite: int = 10
    """End the run when this many steps in a row could not be applied."""
    out_of_memory: Literal["halve", "stop"] = "halve"
    """When a step does not fit into memory: halve `micro_batch` and go on, with the same global
    batch and the same losses; with several ranks the next start does so. Or stop, with advice."""
    timeout_seconds: float = 600.0
    """A rank that others wait for in a call for longer ends the run, with its name and place."""
    stall_seconds: float | None = 30.0
    """A rank that others wait for so long ends the run if it is stopped, dead or cut off, or if all
    wait for each other in different calls. One that lives, and is in code of yours (a debugger, a
    server that is asked, a slow file system), is named, and waited for until `timeout_seconds`.
    None: nobody is watched."""
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    schedule: ScheduleSettings = ScheduleSettings()
    average: AverageSettings = AverageSettings()
    data: DataSettings = DataSettings()
    evaluate: EvaluateSettings = EvaluateSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    resume: ResumeSettings = ResumeSettings()
    spikes: SpikeSettings = SpikeSettings()

    def __post_init__(self) -> None:
        """Raises `SettingError` for what is of another type, or out of range."""
        check_types(self)
        at_least = {
            "seed": -LARGEST_SEED - 1,
            "steps": 1,
            "global_batch": 1,
            "micro_batch": 1,
            "log_every": 1,
            "max_nonfinite": 1,
            "average.decay": 0,
            "average.every": 1,
            "average.start": 0,
            "data.by_length": 1,
            "data.workers": 0,
            "evaluate.every": 1,
            "evaluate.micro_batch": 1,
            "checkpoint.every": 1,
            "checkpoint.keep_last": 1,
            "checkpoint.keep_best": 1,
            "checkpoint.keep_every": 1,
            "spikes.history": 20,
            "spikes.max_roll_backs": 0,
            "optimizer.lr": 0,
            "optimizer.weight_decay": 0,
            "schedule.warmup": 0,
            "schedule.final": 0,
        }
        at_most = {
            "seed": LARGEST_SEED,
            "average.decay": 1,
            "timeout_seconds": LONGEST_SECONDS,
            "stall_seconds": LONGEST_SECONDS,
            "data.workers": most_at_once(),
        }
        values = flatten(self)
        for key, least in at_least.items():
            check_range(key, values[key], least, at_most.get(key, LARGEST))
        or_none = ("stall_seconds", "max_grad_norm", "spikes.factor")
        for key in ("epochs", "timeout_seconds", *or_none):
            if values[key] is not None and not values[key] > 0:  # nor is NaN
                none = " or none" if key in or_none else ""
                raise SettingError(f"{key} is {short(values[key])}; it must be above 0{none}")
            check_range(key, values[key], 0, at_most.get(key, LARGEST))
        if self.precision not in PRECISIONS:
            names = ", ".join(PRECISIONS)
            raise SettingError(f"precision is {short(self.precision)}; allowed: {names}")
        build_schedule(total_steps=1, **dataclasses.asdict(self.schedule))

    def plan(self, options: Any = None) -> Plan:
        """The driver's part of the settings. `options`: its own arguments."""
        return Plan(
            precision=PRECISIONS[self.precision],
            max_grad_norm=self.max_grad_norm,
            compile=self.compile,
            compile_options=self.compile_options,
            activation_checkpointing=self.activation_checkpointing,
            seed=self.seed,
            global_batch=self.global_batch,
            micro_batch=self.micro_batch,
            timeout_seconds=self.timeout_seconds,
            stall_seconds=self.stall_seconds,
            options=options,
        )
