"""Checks of single arguments and of combinations."""

from __future__ import annotations

import os
from typing import Any

from ...kernel.errors import SettingError
from ...trainer.preemption_notice import check_notices
from ..cuda import has_bf16
from ..enums import IntervalStrategy, SaveStrategy, SchedulerType
from ..errors import ArgumentError
from ..profile import PROFILES, profile_of
from .launcher import PRECISIONS

__all__ = ["CHOICES", "LOG_LEVELS", "validate"]

LOG_LEVELS = {
    "detail": 10,
    "debug": 10,
    "info": 20,
    "warning": 30,
    "error": 40,
    "critical": 50,
    "passive": -1,
}
"""Levels of `logging` by name; passive leaves them as they are."""

CHOICES: dict[str, tuple[Any, ...]] = {
    "log_level": tuple(LOG_LEVELS),
    "log_level_replica": tuple(LOG_LEVELS),
    "include_num_input_tokens_seen": ("no", "all", "non_padding"),
    "train_sampling_strategy": ("random", "sequential", "group_by_length", "batch_rebalance"),
    "dataloader_multiprocessing_context": ("fork", "spawn", "forkserver"),
    "profile": tuple(PROFILES),
    "checkpoint_format": ("drivetrain", "hf"),
    "resume_hyper_parameters": ("checkpoint", "arguments"),
}
"""The allowed words of an argument, besides its default."""
_AT_LEAST = {
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "dataloader_num_workers": 0,
    "warmup_steps": 0,
}


def validate(args: Any) -> None:
    """Raises `ArgumentError` for the first invalid value or combination."""
    for name, allowed in CHOICES.items():
        if getattr(args, name) not in (*allowed, getattr(type(args), name)):
            listed = ", ".join(map(repr, allowed))
            raise ArgumentError(f"{name} is {getattr(args, name)!r}; allowed: {listed}")
    for name, bound in _AT_LEAST.items():
        if getattr(args, name) < bound:
            raise ArgumentError(f"{name} is {getattr(args, name)}; it must be at least {bound}")
    for name in ("torch_empty_cache_steps", "stats_steps", "replay_step"):
        every = getattr(args, name)
        if every is not None and not (isinstance(every, int) and every > 0):
            raise ArgumentError(f"{name} is {every!r}; it must be an integer above 0")
    if args.stats_activations and args.stats_steps is None:
        raise ArgumentError(
            f"stats_activations is {args.stats_activations}, and stats_steps is None, which "
            "measures no step: set stats_steps=100, say"
        )
    if args.dataloader_prefetch_factor is not None and args.dataloader_num_workers == 0:
        raise ArgumentError(
            f"dataloader_prefetch_factor is {args.dataloader_prefetch_factor}, and "
            "dataloader_num_workers is 0: nobody would fetch ahead; give it workers"
        )
    _notices(args)
    _intervals(args)
    _best_model(args)
    _precisions(args)
    needs_evaluation = (SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY)
    if args.lr_scheduler_type in needs_evaluation and args.eval_strategy == IntervalStrategy.NO:
        raise ArgumentError(
            f"lr_scheduler_type is {args.lr_scheduler_type.value!r}, which goes by evaluations, "
            "and eval_strategy is 'no'; set it to steps or epoch"
        )


def _notices(args: Any) -> None:
    """Check the notices of preemption; a single text becomes a list."""
    if isinstance(args.preemption_notice, str):
        args.preemption_notice = [args.preemption_notice]
    if not isinstance(args.preemption_notice, (list, tuple, type(None))):
        raise ArgumentError(
            f"preemption_notice is {args.preemption_notice!r:.200}; it must be a list of texts"
        )
    try:
        check_notices(args.preemption_notice)
    except SettingError as error:
        raise ArgumentError(str(error)) from None


def _intervals(args: Any) -> None:
    """Check that steps are whole numbers or shares below 1; whole numbers become integers."""
    for what in ("logging", "eval", "save"):
        name, steps = f"{what}_steps", getattr(args, f"{what}_steps")
        if getattr(args, f"{what}_strategy") != "steps":
            continue
        if what == "logging" and steps == 0:
            raise ArgumentError("logging_strategy is 'steps' and logging_steps is 0; set either")
        if steps > 1:
            if steps != int(steps):
                raise ArgumentError(f"{name} is {steps}; above 1 it must be an integer")
            setattr(args, name, int(steps))


def _best_model(args: Any) -> None:
    """Check that checkpoints coincide with evaluations, so that the best one is known."""
    if not args.load_best_model_at_end or args.save_strategy == SaveStrategy.BEST:
        return
    if str(args.eval_strategy.value) != str(args.save_strategy.value):
        raise ArgumentError(
            f"load_best_model_at_end needs eval_strategy ({args.eval_strategy.value!r}) and "
            f"save_strategy ({args.save_strategy.value!r}) to be the same, or save_strategy='best'"
        )
    if args.eval_strategy != IntervalStrategy.STEPS:
        return
    pair = f"save_steps is {args.save_steps} and eval_steps is {args.eval_steps}"
    if (args.save_steps < 1) != (args.eval_steps < 1):
        raise ArgumentError(
            f"{pair}: load_best_model_at_end needs both as shares or both as numbers of steps, "
            "or a checkpoint may fall between evaluations"
        )
    # compare shares in millionths: a remainder of floats would be a rounding error
    unit = 1 if args.save_steps >= 1 else 1_000_000
    if round(args.save_steps * unit) % round(args.eval_steps * unit):
        raise ArgumentError(
            f"{pair}: load_best_model_at_end needs save_steps to be a multiple of eval_steps"
        )


def _precisions(args: Any) -> None:
    for kinds in (PRECISIONS, ("fp16_full_eval", "bf16_full_eval")):
        given = [name for name in kinds if getattr(args, name, False)]
        if len(given) > 1:
            raise ArgumentError(f"{' and '.join(given)} are both True; at most one can be")
    asked = [name for name in ("bf16", "bf16_full_eval") if getattr(args, name)]
    if asked and profile_of(args).bf16_needs_hardware and not _has_bf16(args):
        raise ArgumentError(
            f"{asked[0]} is True and no GPU here computes in bfloat16; set use_cpu=True or "
            "backend='cpu' to train on the CPU"
        )


def _has_bf16(args: Any) -> bool:
    """True if bfloat16 can be used: on a device that supports it, or on a CPU that the arguments
    select."""
    import torch

    is_chosen = args.use_cpu or args.backend or os.environ.get("ACCELERATE_USE_CPU", "") == "true"
    if is_chosen or "PJRT_DEVICE" in os.environ or torch.xpu.is_available():
        return True
    return has_bf16()
