"""What a user may set, with defaults, and how a text becomes a value.

Settings are nested frozen dataclasses. `override` takes dotted keys (`optimizer.lr`) and texts or
values, and refuses what is unknown or ill-typed by name.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import json
import math
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from .contract import Plan, Precision
from .errors import SettingError

__all__ = [
    "PRECISIONS",
    "CheckpointSettings",
    "DataSettings",
    "EvaluateSettings",
    "OptimizerSettings",
    "ScheduleSettings",
    "Settings",
    "SpikeSettings",
    "flatten",
    "override",
]

PRECISIONS = {
    "fp32": Precision("fp32"),
    "bf16": Precision("bf16", compute=torch.bfloat16),
    "fp16": Precision("fp16", compute=torch.float16, loss_scaling=True),
}
"""Mixed precision by name: weights and reductions stay float32."""


@dataclass(frozen=True)
class OptimizerSettings:
    """Any `torch.optim.Optimizer` by dotted name."""

    name: str = "torch.optim.AdamW"
    lr: float = 1e-3
    weight_decay: float = 0.0
    """For tensors of two or more dimensions; biases, norms and other vectors get none."""
    args: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the optimizer's constructor."""

    def build(self, named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """The optimizer over two groups, with and without decay; over one where none decays.
        Raises `SettingError`."""
        module, _, attribute = self.name.rpartition(".")
        try:
            factory = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise SettingError(
                f"optimizer.name is {self.name!r}, which cannot be imported ({error}); give the "
                "full dotted name of a torch optimizer, such as torch.optim.SGD"
            ) from error
        trainable = [parameter for _, parameter in named if parameter.requires_grad]
        decaying = [p for p in trainable if p.dim() >= 2 and self.weight_decay]
        rest = [p for p in trainable if p.dim() < 2 or not self.weight_decay]
        groups = [
            {"params": chosen, "weight_decay": decay}
            for chosen, decay in ((decaying, self.weight_decay), (rest, 0.0))
            if chosen
        ]
        args = dict(self.args)
        if self.name in ("torch.optim.AdamW", "torch.optim.Adam") and _can_fuse(trainable):
            # one kernel for all parameters, and it honours `found_inf`
            args.setdefault("fused", True)
        try:
            return typing.cast(torch.optim.Optimizer, factory(groups, lr=self.lr, **args))
        except (TypeError, ValueError) as error:
            raise SettingError(f"optimizer {self.name!r} refuses {args}: {error}") from error


def _can_fuse(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether torch has fused optimizers for where the parameters are."""
    devices = _get_fused_kernels_supported_devices()
    return all(p.device.type in devices and p.is_floating_point() for p in parameters)


@dataclass(frozen=True)
class ScheduleSettings:
    """See `build_schedule`."""

    name: str = "cosine"
    warmup: float = 0.0
    final: float = 0.1
    decay: float = 0.2


@dataclass(frozen=True)
class DataSettings:
    """How samples are ordered and fetched."""

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
    verify: bool = True
    """Before resuming, read all that is resumed from and compare its checksums, each rank a part.
    A checkpoint that is not as it was written is left out for the one before it, and kept."""
    stop_on_error: bool = False
    """End the run when a checkpoint cannot be written, instead of going on with the last one."""


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
    spike; 6 is a good start. None does not watch."""
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
    """A collective that takes longer ends the run with the name of the rank and the call."""
    stall_seconds: float | None = 30.0
    """A rank that does nothing for so long while others wait for it ends the run: one that is
    stopped or cut off, at any time; one that idles (asleep, deadlocked, reading from a source that
    does not answer), in training and evaluation from the second step on. None never."""
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    data: DataSettings = DataSettings()
    evaluate: EvaluateSettings = EvaluateSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    spikes: SpikeSettings = SpikeSettings()

    def __post_init__(self) -> None:
        at_least = {
            "steps": 1,
            "global_batch": 1,
            "micro_batch": 1,
            "log_every": 1,
            "max_nonfinite": 1,
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
        }
        values = flatten(self)
        for key, bound in at_least.items():
            if values[key] is not None and values[key] < bound:
                raise SettingError(f"{key} is {values[key]}; it must be at least {bound}")
        or_none = ("stall_seconds", "max_grad_norm", "spikes.factor")
        for key in ("epochs", "timeout_seconds", *or_none):
            value = values[key]
            if value is not None and not (value > 0 and math.isfinite(value)):
                none = " or none" if key in or_none else ""
                raise SettingError(f"{key} is {value}; it must be above 0{none}")
        if self.precision not in PRECISIONS:
            raise SettingError(f"precision is {self.precision!r}; allowed: {', '.join(PRECISIONS)}")

    def plan(self, options: Any = None) -> Plan:
        """What the driver gets to know. `options`: its own arguments."""
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


T = TypeVar("T")


def flatten(settings: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value, in order of declaration."""
    flat: dict[str, Any] = {}
    for item in dataclasses.fields(settings):
        value = getattr(settings, item.name)
        if dataclasses.is_dataclass(value):
            flat.update(flatten(value, f"{prefix}{item.name}."))
        else:
            flat[prefix + item.name] = value
    return flat


def override(settings: T, values: Mapping[str, Any], prefix: str = "") -> T:
    """A copy with the dotted keys replaced; texts are parsed by the field's type.

    A key below a dict field (`optimizer.args.momentum`) sets one entry. Raises `SettingError` with
    the key, the value seen, and the nearest known key or the expected type.
    """
    changes: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}
    hints = typing.get_type_hints(type(settings))
    for key, value in values.items():
        head, _, rest = key.partition(".")
        if head not in hints:
            known = list(flatten(settings))
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"known: {', '.join(known)}"
            raise SettingError(f"unknown setting {prefix}{key!s}; {hint}")
        if rest:
            nested.setdefault(head, {})[rest] = value
        else:
            changes[head] = parse(prefix + key, value, hints[head])
    for head, inner in nested.items():
        current = changes.get(head, getattr(settings, head))
        if dataclasses.is_dataclass(current):
            changes[head] = override(current, inner, f"{prefix}{head}.")
        elif isinstance(current, dict):
            parsed = {name: _literal(value) for name, value in inner.items()}
            changes[head] = {**current, **parsed}
        else:
            raise SettingError(
                f"setting {prefix}{head} has no parts, so {next(iter(inner))!r} "
                f"cannot be set in it; set {prefix}{head} itself"
            )
    return dataclasses.replace(settings, **changes)  # type: ignore[type-var]


def parse(key: str, value: Any, hint: Any) -> Any:
    """`value` (a text, or already a value) as the type `hint`. Raises `SettingError`."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        options = typing.get_args(hint)
        if type(None) in options and value in (None, "none", "None", "null"):
            return None
        hint = next(option for option in options if option is not type(None))
    origin = typing.get_origin(hint) or hint
    if hint is Any:
        return _literal(value)
    if origin is typing.Literal:
        if value in typing.get_args(hint):
            return value
        raise SettingError(f"{key} is {value!r}; allowed: {', '.join(typing.get_args(hint))}")
    if origin is tuple:
        parts = value.split(",") if isinstance(value, str) else value
        if isinstance(parts, (list, tuple)):
            return tuple(parse(key, part, typing.get_args(hint)[0]) for part in parts if part != "")
    elif origin is dict:
        parsed = _literal(value)
        if isinstance(parsed, dict):
            return parsed
    elif isinstance(value, str) and origin is not str:
        parsed = _literal(value)
        if origin is float and isinstance(parsed, int) and not isinstance(parsed, bool):
            return float(parsed)
        if type(parsed) is origin:
            return parsed
    elif type(value) is origin:
        return value
    elif origin is float and type(value) is int:
        return float(value)
    name = getattr(origin, "__name__", str(hint))
    raise SettingError(f"{key} is {value!r}, which is not of type {name}")


def _literal(value: Any) -> Any:
    """A JSON literal where the text is one (`True` and `1e-3` too), else the text."""
    if not isinstance(value, str):
        return value
    named: dict[str, Any] = {"True": True, "False": False, "None": None, "none": None}
    if value in named:
        return named[value]
    try:
        return json.loads(value)
    except ValueError:
        try:
            return float(value)
        except ValueError:
            return value
