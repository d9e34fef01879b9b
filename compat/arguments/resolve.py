"""Resolves argument values to their final form: enums, derived defaults, dicts from JSON.

Every function works on any object with the fields, so that arguments of other libraries can be
resolved by the same rules.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any

from ..cuda import has_tf32
from ..enums import (
    DebugOption,
    HubStrategy,
    IntervalStrategy,
    OptimizerNames,
    SaveStrategy,
    SchedulerType,
)
from ..errors import ArgumentError
from ..profile import profile_of
from . import backend
from .accelerator_config import AcceleratorConfig, require_state
from .report_to import trackers_of
from .values import as_numbers

__all__ = ["log_verbosity", "resolve"]

_LOG = logging.getLogger(__name__)

_WORDS = {
    "eval_strategy": IntervalStrategy,
    "logging_strategy": IntervalStrategy,
    "save_strategy": SaveStrategy,
    "hub_strategy": HubStrategy,
    "lr_scheduler_type": SchedulerType,
    "optim": OptimizerNames,
}
_NEW_NAMES = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}


def resolve(args: Any) -> None:
    """Resolve all fields to their final values, and check them. Raises `ArgumentError`."""
    args.output_dir = os.path.expanduser(args.output_dir or "trainer_output")
    if "://" in args.output_dir:
        raise ArgumentError(
            f"output_dir={args.output_dir!r} is a URL: give a folder, or save to URLs by "
            "drivetrain.kernel"
        )
    for name in args._VALID_DICT_FIELDS:
        value = getattr(args, name)
        if isinstance(value, str) and value.startswith("{"):
            setattr(args, name, as_numbers(json.loads(value)))
    for name, word in _WORDS.items():
        setattr(args, name, word(getattr(args, name)))
    if str(args.fsdp).lower() in ("true", "false"):  # from a command line
        args.fsdp = str(args.fsdp).lower() == "true"
    args.debug = [DebugOption(word) for word in _listed(args.debug)]
    _rename_checkpointing(args)
    _derive(args)
    args._validate_args()
    args.mixed_precision = backend.mixed_precision(args)
    if args.torch_compile_backend or args.torch_compile_mode:
        args.torch_compile = True
    if args.torch_compile and args.torch_compile_backend is None:
        args.torch_compile_backend = "inductor"
    args.accelerator_config = AcceleratorConfig.of(args.accelerator_config)
    require_state(args.accelerator_config)
    if args.use_cpu:
        args.dataloader_pin_memory = False
    _set_tf32(args)
    backend.describe(args)


def log_verbosity() -> int:
    """Return the log level of transformers if it is in use, else of this library."""
    theirs = sys.modules.get("transformers")
    if theirs is not None:
        return int(theirs.utils.logging.get_verbosity())
    return logging.getLogger("drivetrain").getEffectiveLevel()


def _listed(words: Any) -> list[Any]:
    return words.split() if isinstance(words, str) else list(words or ())


def _rename_checkpointing(args: Any) -> None:
    """Use the old names if the new ones are not given; afterwards both have the same value."""
    for old, new in _NEW_NAMES.items():
        if getattr(args, new) is None:
            setattr(args, new, getattr(args, old))
        setattr(args, old, getattr(args, new))
    if args.activation_checkpointing is None:
        args.activation_checkpointing = args.gradient_checkpointing = False


def _derive(args: Any) -> None:
    """Fill in defaults that depend on other arguments."""
    if args.disable_tqdm is None:
        args.disable_tqdm = log_verbosity() > logging.WARNING
    if isinstance(args.include_num_input_tokens_seen, bool):
        args.include_num_input_tokens_seen = "all" if args.include_num_input_tokens_seen else "no"
    if args.eval_strategy != IntervalStrategy.NO:
        args.do_eval = True
    if args.eval_strategy == IntervalStrategy.STEPS and not args.eval_steps:
        if args.logging_steps <= 0:
            raise ArgumentError(
                f"eval_strategy is 'steps', eval_steps is {args.eval_steps} and logging_steps, "
                f"which would stand in for it, is {args.logging_steps}; set eval_steps"
            )
        args.eval_steps = args.logging_steps
    by_metric = (SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY)
    if args.load_best_model_at_end or args.lr_scheduler_type in by_metric:
        args.metric_for_best_model = args.metric_for_best_model or "loss"
    if args.greater_is_better is None and args.metric_for_best_model is not None:
        args.greater_is_better = not args.metric_for_best_model.endswith("loss")
    if args.report_to is None:
        args.report_to = profile_of(args).default_trackers
    args.report_to = trackers_of(args.report_to)


def _set_tf32(args: Any) -> None:
    """Allow or forbid TF32. By default a compiled model in float32 or bfloat16 may use it. Raises
    `ArgumentError` if TF32 is requested and the hardware lacks it.
    """
    import torch

    able = has_tf32()
    if args.tf32 and not able:
        raise ArgumentError(
            "tf32 is True, and this machine has no NVIDIA GPU of the Ampere generation or newer; "
            "leave it at None"
        )
    allowed = args.tf32
    if args.torch_compile and not able:
        _LOG.warning(
            "torch_compile: most of its gain comes with NVIDIA GPUs of the Ampere generation or "
            "newer, and there is none here"
        )
    elif args.torch_compile and allowed is None and (args.bf16 or not args.fp16):
        _LOG.info("torch_compile: float32 products may use TF32; tf32=False forbids it")
        allowed = True
    if allowed is not None and able:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
