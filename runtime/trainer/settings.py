"""The settings of a run, with defaults.

Settings are nested frozen dataclasses. `override` takes dotted keys (`optimizer.lr`) with strings
or values, and refuses unknown keys and values of a wrong type by name.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch

from ..data.batch_sizes import MOST_WARMUP_STEPS, BatchSizes
from ..data.ranges import Choice, Range, check_ranges
from ..kernel.errors import SettingError
from ..kernel.plan import Plan, Precision
from .former_names import accept_former_names
from .optimizers import OptimizerGroup, OptimizerSettings
from .preemption_notice import check_notices
from .schedule import SCHEDULES, Schedule, build_schedule
from .setting_values import check_types

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
    "StatsSettings",
    "StopSettings",
]

PRECISIONS = {
    "fp32": Precision("fp32"),
    "bf16": Precision("bf16", compute=torch.bfloat16),
    "fp16": Precision("fp16", compute=torch.float16, loss_scaling=True),
    "float8": Precision("float8", compute=torch.bfloat16, linear=torch.float8_e4m3fn),
}
"""Mixed precision by name: weights and reductions stay float32."""

LARGEST_SEED = 2**63 - 1
"""Half the largest seed of torch, since ranks and steps are added to the seed."""
LONGEST_SECONDS = 10**9
"""Communication libraries count nanoseconds in 63 bits, which is ten times as long."""


Count = Annotated[int, Range(1)]
Steps = Annotated[int, Range(1, unit="steps")]
Samples = Annotated[int, Range(1, unit="samples")]
Seconds = Annotated[float, Range(above=0, most=LONGEST_SECONDS, unit="seconds")]


@dataclass(frozen=True)
class ScheduleSettings:
    """How the learning rate changes; see `build_schedule`."""

    name: Annotated[str, Choice(SCHEDULES)] = "cosine"
    """The shape of the fall after the warmup."""
    warmup: Annotated[float, Range(0, unit="steps, or a share of them below 1")] = 0.0
    """Steps over which the rate rises at first; below 1, a share of all steps."""
    final: Annotated[float, Range(0)] = 0.1
    """The share of the rate that is left at the end. constant, inverse_sqrt, plateau, step and
    multistep ignore it."""
    decay: Annotated[float, Range(above=0, most=1)] = 0.2
    """The share of the steps after the warmup in which warmup_stable_decay falls."""
    power: Annotated[float, Range(above=0)] = 1.0
    """Exponent of polynomial."""
    cycles: Count = 1
    """Number of falls of cosine_with_restarts."""
    step_size: Annotated[float, Range(above=0, unit="steps, or a share of them below 1")] | None = (
        None
    )
    """Steps between two falls of step, after the warmup."""
    milestones: tuple[float, ...] = ()
    """Steps at which multistep falls, from the first step of the run on; below 1, shares of all
    steps."""
    gamma: Annotated[float, Range(0, most=1)] = 0.1
    """Factor of the rate at each fall of plateau, step and multistep."""
    metric: str | None = None
    """The rate falls when this metric of the evaluations no longer improves, with plateau: `loss`,
    or a name such as `held_out.loss`."""
    patience: Annotated[int, Range(1, unit="evaluations")] = 3
    """Evaluations in a row without a better value before a fall of plateau."""
    mode: Literal["min", "max"] = "min"
    """For plateau: `min`: smaller is better; `max`: larger."""
    min_change: Annotated[float, Range(0)] = 0.0
    """For plateau: a value counts as better if it is better by more than this."""

    def build(self, total_steps: int | None) -> Schedule:
        """Return the schedule over `total_steps` updates, as `build_schedule` does; it is 1 after
        the warmup of plateau. Raises `SettingError`."""
        if self.name == "plateau" and self.metric is None:
            raise SettingError(
                "schedule.name is 'plateau', and schedule.metric is not set: set the metric of the "
                "evaluations by which the learning rate falls, such as metric=loss"
            )
        if self.name != "plateau" and self.metric is not None:
            raise SettingError(
                f"schedule.metric is {self.metric!r}, which only schedule.name=plateau uses, and "
                f"schedule.name is {self.name!r}"
            )
        shape = dataclasses.asdict(self)
        for of_plateau in ("metric", "patience", "mode", "min_change"):
            del shape[of_plateau]
        return build_schedule(total_steps=total_steps, **shape)


@dataclass(frozen=True)
class AverageSettings:
    """An exponential moving average of the weights, kept beside them: in float32, sharded as the
    weights are, saved and resumed with them. The formula is that of torch.optim.swa_utils."""

    decay: Annotated[float, Range(0, most=1)] | None = None
    """The share of the average that stays at each move towards the weights, such as 0.999. None
    keeps no average."""
    every: Annotated[int, Range(1, unit="updates")] = 1
    """Updates between two moves of the average."""
    start: Annotated[int, Range(0, unit="updates")] = 0
    """Updates before the first move, at which the average equals the weights."""


@dataclass(frozen=True)
class DataSettings:
    """The order of samples, and how they are fetched."""

    shuffle: bool | None = None
    """None: shuffled where samples can be fetched by index; other data come in their own order."""
    by_length: Steps | None = None
    """Train samples of similar length together, to pad less: the shuffled order is sorted by
    `Recipe.lengths` in stretches of this many steps (50 is usual). None keeps the shuffled
    order."""
    drop_last: bool = False
    """Leave out the last samples of an epoch that do not fill a global batch."""
    batch_warmup: Annotated[int, Range(1, most=MOST_WARMUP_STEPS, unit="steps")] | None = None
    """Let the global batch grow to `global_batch` over this many steps, in multiples of
    `batch_warmup_from`, each for nearly the same number of steps. The size depends only on the
    samples before it, so a resumed run continues with the same sizes. None: every batch is
    `global_batch`."""
    batch_warmup_from: Samples | None = None
    """Samples of the first update, over all ranks; the number divides `global_batch`."""
    workers: Annotated[int, Range(0, of_machine=True, unit="processes of each rank")] = 0
    """Processes that fetch microbatches; 0 fetches in the training process."""
    overfit: Samples | None = None
    """Train and evaluate on this many samples, the first ones, alone: a sound model and recipe
    learn them by heart. None: all data."""


@dataclass(frozen=True)
class EvaluateSettings:
    """When and how to evaluate."""

    every: Steps | None = None
    """Steps between evaluations; None only at the end."""
    every_epochs: Annotated[float, Range(above=0, unit="epochs")] | None = None
    """Evaluate after this share of an epoch, too, such as 0.25; for data that have a length."""
    max_batches: Annotated[int, Range(1, unit="batches of each rank")] | None = None
    """Measure at most this many batches of each data set, the first ones, on each rank. None:
    all."""
    at_end: bool = True
    """Evaluate after the last step, too."""
    micro_batch: Samples | None = None
    """Samples in one forward; the training one by default."""
    sanity_check: bool = True
    """Evaluate a few samples of each data set before the first step, to find mistakes in `measure`
    and `summarise`, and losses that are means instead of sums, at once."""
    weights: Literal["present", "average"] = "present"
    """`average`: evaluate the average of the weights (see `average.decay`), once it exists."""


@accept_former_names("checkpoint", behind="background")
@dataclass(frozen=True)
class CheckpointSettings:
    """When to save, and what to keep."""

    every: Steps | None = None
    """Steps between checkpoints; None only at the end."""
    every_minutes: Annotated[float, Range(above=0, unit="minutes")] | None = None
    """Save also when this many minutes have passed since the last save, by the clock of rank 0."""
    at_end: bool = True
    """Save after the last step, too."""
    keep_last: Annotated[int, Range(1, unit="checkpoints")] = 2
    """Keep this many of the newest checkpoints; older ones are removed."""
    keep_best: Annotated[int, Range(1, unit="checkpoints")] = 1
    """Keep also this many checkpoints with the best `best_metric`."""
    best_metric: str = "loss"
    """A metric of the first data set, or with the name of another: `held_out.loss`."""
    best_mode: Literal["min", "max"] = "min"
    """`min`: the least is the best; `max`: the largest."""
    save_best: bool = False
    """Save after an evaluation that is better than all before it, also between two saves. A
    `best_metric` other than the loss turns this on, too."""
    keep_every: Steps | None = None
    """Checkpoints of steps divisible by this are kept for ever."""
    background: bool = False
    """Save in the background: training waits only for a copy into host memory, which is as large as
    the rank's share of the checkpoint and is reused by the next save. The run waits for its last
    checkpoint."""
    link_frozen: bool = False
    """Do not write frozen weights (`drivetrain.lora`) again in each checkpoint: they are in
    separate files, and a save whose checksums show no change links to the files of an earlier
    checkpoint. Two consecutive checkpoints share no file, so the first two are written. A tool that
    changes such a file in place changes several checkpoints."""
    verify: bool = True
    """Before resuming, read the whole checkpoint and compare its checksums, each rank a part. A
    damaged checkpoint is skipped for the one before it, and kept."""
    stop_on_error: bool = False
    """End the run when a checkpoint cannot be written, instead of continuing with the last
    checkpoint."""


@dataclass(frozen=True)
class ResumeSettings:
    """Parts of a checkpoint that a resumed run restores besides weights and progress."""

    optimizer: Literal["keep", "fresh"] = "keep"
    """`keep`: restore the optimizer's state; the state of another optimizer, or of one with other
    options, is refused. `fresh`: the optimizer starts over in a run that begins with this setting
    or another optimizer; when that run is resumed, its state is kept."""


@dataclass(frozen=True)
class SpikeSettings:
    """Detection of steps whose loss is far above the usual loss.

    Spikes are detected when the loss is logged, and before a checkpoint is saved, so that no
    checkpoint is saved after a spike. Chowdhery et al. rolled back and left out the data of spikes
    (https://arxiv.org/abs/2204.02311, section 5.1).
    """

    factor: Annotated[float, Range(above=0)] | None = None
    """A loss is a spike if it is above the median of the last `history` losses by this many typical
    deviations (1.4826 times the median absolute deviation, which is the standard deviation of a
    normal distribution); 6 is a good start. None does not watch for spikes. If updates take turns,
    each is compared with the updates of its own turn."""
    history: Annotated[int, Range(20, unit="steps")] = 100
    """Steps whose losses are compared; the first 20 steps of a run are not judged."""
    roll_back: bool = False
    """Roll back to the newest checkpoint, and leave out the samples of the spike's steps and of the
    step before, whose update may be the cause. If false, a spike is reported and training
    continues."""
    max_roll_backs: Annotated[int, Range(0)] = 3
    """A spike after this many roll-backs ends the run."""


@dataclass(frozen=True)
class StopSettings:
    """When to end a run before its last step; see `EarlyStopping`."""

    metric: str | None = None
    """End the run when this metric of the evaluations no longer improves: `loss`, or a name such as
    `held_out.loss`. None does not."""
    patience: Annotated[int, Range(1, unit="evaluations")] = 3
    """Evaluations in a row without a better value."""
    mode: Literal["min", "max"] = "min"
    """`min`: smaller is better; `max`: larger."""
    min_change: Annotated[float, Range(0)] = 0.0
    """A value counts as better if it is better by more than this."""


@dataclass(frozen=True)
class StatsSettings:
    """Statistics by parameter and by module, at some logs; docs/guides/statistics.md."""

    every: Annotated[int, Range(0, unit="logs")] = 0
    """Logs between statistics of each parameter: the norms of gradient, weights and update, zeros,
    and values that are not finite. 0: none. They go to the records and the report."""
    activations: tuple[str, ...] = ()
    """Names of modules, or patterns such as `blocks.*.mlp`, whose activations are measured, too:
    mean, deviation, largest value, zeros, and values that are not finite."""
    trackers: bool = False
    """Send the statistics to trackers, too: several curves for each parameter."""


@dataclass(frozen=True)
class Settings:
    """A whole run, apart from what to train (the recipe) and where (the backend)."""

    steps: Steps | None = None
    """Updates in all; by default `epochs` decides."""
    epochs: Annotated[float, Range(above=0, unit="epochs")] = 1.0
    """Passes over the data, if `steps` is none."""
    global_batch: Samples = 32
    """Samples in one update, over all ranks; independent of the world size."""
    micro_batch: Samples | None = None
    """At most this many samples in one forward on one rank; accumulation follows from it."""
    precision: Annotated[str, Choice(tuple(PRECISIONS))] = "fp32"
    """The precision of forward and backward; weights and sums over ranks stay float32."""
    max_grad_norm: Annotated[float, Range(above=0)] | None = 1.0
    """Limit of the norm of the whole gradient of an update; a longer gradient is scaled down to it.
    None: no limit."""
    max_grad_value: Annotated[float, Range(above=0)] | None = None
    """Limit of each element of the gradient of an update: larger ones are set to it, or to minus
    it. It is applied after `max_grad_norm`; set that to none to clip by value alone. The gradient
    norm that is logged is the one before both. None: no limit."""
    seed: Annotated[int, Range(-LARGEST_SEED - 1, most=LARGEST_SEED)] = 0
    """Decides the initial weights, the order of samples, and dropout."""
    compile: bool = False
    """Compile the model with `torch.compile`."""
    compile_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of `torch.compile`: `backend`, `mode` and so on."""
    activation_checkpointing: tuple[str, ...] = ()
    """Names of module classes whose activations are computed again in the backward instead of being
    kept: less memory, more time."""
    detect_anomaly: bool = False
    """End the run at the first operation whose backward gives NaN, and show the line of its
    forward (`torch.autograd.set_detect_anomaly`). Slow."""
    find_nonfinite: bool = True
    """After a step that is not finite, run its microbatches again and name the first tensor that is
    not: module, operation, rank, microbatch and sample. It changes nothing of the run."""
    find_synchronisations: bool = False
    """Find the lines of the recipe at which the host waits for the device, such as `.item()`, and
    name them at the end. Slow."""
    account_memory: bool = True
    """Count in the first step what takes memory, by part and by module. The counting changes no
    number; later steps run without it."""
    log_every: Steps = 10
    """Steps between logs."""
    digests: Literal["weights", "samples", "none"] = "weights"
    """Digests that each log records, for `drivetrain replay` and `drivetrain compare`. `weights`:
    of the samples of the step, of the random state, of each gradient and of each weight;
    `samples`: not of gradients and weights; `none`: no digests."""
    max_nonfinite: Steps = 10
    """End the run when this many steps in a row could not be applied."""
    out_of_memory: Literal["halve", "stop"] = "halve"
    """When a step runs out of memory: `halve` halves `micro_batch` and continues with the same
    global batch and the same losses; with several ranks the next start does so. `stop` ends the run
    with advice."""
    timeout_seconds: Seconds = 600.0
    """A rank that others wait for in a call for longer than this ends the run; the error names the
    rank and where it is."""
    stall_seconds: Seconds | None = 30.0
    """A rank that others wait for this long ends the run if it is stopped, dead or unreachable, or
    if all wait for each other in different calls. A live rank in your own code (a debugger, a
    server request, a slow file system) is reported, and waited for until `timeout_seconds`. None:
    ranks are not watched."""
    recover: Literal["restart", "in_place"] = "restart"
    """After the death of a rank: `restart` ends the run, which continues from the newest checkpoint
    when it is started again; `in_place` continues in the other processes, from the step during
    which the rank died, with the same global batch. For backends ddp and fsdp on one machine; of
    fsdp the other ranks must hold each part of the state (`backend.shard_size`), or else return to
    the newest checkpoint, in their processes."""
    max_lost: Annotated[int, Range(0, unit="ranks")] | None = None
    """When more ranks than this are missing, a run that recovers in place saves, and stops with
    exit code 75. None: it continues as long as one rank is left."""
    spares: Annotated[int, Range(0, unit="processes")] = 0
    """Processes kept ready, with `recover=in_place`, to take the places of ranks that die."""
    preemption_notice: tuple[str, ...] = ()
    """Notices after which the run saves and stops, besides signals: `file:/path` (the path exists),
    `command:...` (run every 5 seconds, its exit code is 0) and `signal:SIGUSR2`. `--set` separates
    notices at commas, the repeatable `--preemption-notice` does not."""
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    schedule: ScheduleSettings = ScheduleSettings()
    average: AverageSettings = AverageSettings()
    data: DataSettings = DataSettings()
    evaluate: EvaluateSettings = EvaluateSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    resume: ResumeSettings = ResumeSettings()
    spikes: SpikeSettings = SpikeSettings()
    stop: StopSettings = StopSettings()
    stats: StatsSettings = StatsSettings()

    def __post_init__(self) -> None:
        """Raises `SettingError` for a value of another type, or out of range."""
        check_notices(self.preemption_notice)
        check_types(self)
        check_ranges(self)
        self.schedule.build(1)
        self.batch_sizes()

    def batch_sizes(self) -> BatchSizes:
        """The size of each global batch."""
        data = self.data
        return BatchSizes(self.global_batch, data.batch_warmup, data.batch_warmup_from)

    def plan(self, options: Any = None) -> Plan:
        """Return the driver's part of the settings. `options`: the driver's own arguments."""
        return Plan(
            precision=PRECISIONS[self.precision],
            max_grad_norm=self.max_grad_norm,
            max_grad_value=self.max_grad_value,
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
