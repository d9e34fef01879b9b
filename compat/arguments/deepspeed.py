"""`deepspeed`: DeepSpeed's JSON, filled in from the arguments and compared with them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..errors import ArgumentError
from .launcher import launched
from .values import read_mapping

__all__ = ["DeepspeedFacts", "completed", "configuration", "options"]

AUTO = "auto"


def options(args: Any) -> dict[str, Any]:
    """Return the options of the deepspeed driver. Raises `ArgumentError` if JSON and arguments
    differ."""
    return {"config": configuration(args)}


def configuration(args: Any) -> dict[str, Any]:
    """Return a copy of the user's configuration, with each `auto` replaced if an argument gives the
    value.

    Entries about precision and ZeRO's buffers stay `auto` for the driver. Raises `ArgumentError`,
    naming every key that contradicts an argument.
    """
    config = copy.deepcopy(read_mapping(args.deepspeed, "deepspeed"))
    differ = []
    for key, wanted, argument in _wanted(args):
        section, last = _find(config, key)
        if section is None or last not in section:
            continue
        if section[last] == AUTO:
            section[last] = wanted
        elif section[last] != wanted:
            differ.append(f"{key} is {section[last]!r} and {argument} is {wanted!r}")
    for name in ("fp16", "bf16"):
        wanted = bool(getattr(args, name) or getattr(args, f"{name}_full_eval", False))
        written = _value(config, f"{name}.enabled")
        if written not in (None, AUTO, wanted):
            differ.append(f"{name}.enabled is {written!r} and {name} is {wanted!r}")
    if differ:
        raise ArgumentError(
            f"DeepSpeed's configuration and the arguments differ: {'; '.join(differ)}. Make them "
            f"equal, or write {AUTO!r} in the configuration"
        )
    return config


def completed(config: dict[str, Any], micro_batch: int, precision: str) -> dict[str, Any]:
    """Return a copy for other libraries that build an engine for a second model: with a stage and a
    batch size, and without `auto`.
    """
    config = copy.deepcopy(config)
    for name in ("bf16", "fp16"):
        if _value(config, f"{name}.enabled") == AUTO:
            config[name]["enabled"] = precision == name
    config = _without_auto(config)
    config.setdefault("train_micro_batch_size_per_gpu", micro_batch)
    config.setdefault("zero_optimization", {}).setdefault("stage", 2)
    return config


class DeepspeedFacts:
    """DeepSpeed's settings, `completed`, for other libraries, which read them from
    `args.deepspeed_plugin` and `args.hf_deepspeed_config`.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = self.deepspeed_config = config

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage: 1 shards optimizer state, 2 gradients too, 3 weights too."""
        return int(self.get_value("zero_optimization.stage"))

    @property
    def hf_ds_config(self) -> DeepspeedFacts:
        """This object, under the name in accelerate's plugin."""
        return self

    def get_value(self, key: str, default: Any = None) -> Any:
        """Return the value at a dotted key."""
        found = _value(self.config, key)
        return default if found is None else found

    def dtype(self) -> torch.dtype:
        """The dtype of the model's weights between steps, which its inputs must have."""
        for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            if self.get_value(f"{name}.enabled"):
                return dtype
        return torch.float32

    def is_zero2(self) -> bool:
        """True if gradients are sharded and weights are not."""
        return self.zero_stage == 2

    def is_zero3(self) -> bool:
        """True if weights are sharded."""
        return self.zero_stage == 3

    def is_offload(self) -> bool:
        """True if optimizer state or weights are on the host."""
        parts = ("optimizer", "param")
        devices = [
            self.get_value(f"zero_optimization.offload_{part}.device", "none") for part in parts
        ]
        return any(device in ("cpu", "nvme") for device in devices)


def _wanted(args: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield (DeepSpeed's key, value, the argument that gives it)."""
    micro, accumulate = args.per_device_train_batch_size, args.gradient_accumulation_steps
    size = launched().size
    if not args.auto_find_batch_size:
        batch = "per_device_train_batch_size"
        yield "train_micro_batch_size_per_gpu", micro, batch
        yield "train_batch_size", micro * accumulate * size, f"{batch}, of all processes, steps"
    yield "gradient_accumulation_steps", accumulate, "gradient_accumulation_steps"
    yield "gradient_clipping", args.max_grad_norm, "max_grad_norm"
    yield "optimizer.params.lr", args.learning_rate, "learning_rate"
    yield "optimizer.params.betas", [args.adam_beta1, args.adam_beta2], "adam_beta1, adam_beta2"
    yield "optimizer.params.eps", args.adam_epsilon, "adam_epsilon"
    yield "optimizer.params.weight_decay", args.weight_decay, "weight_decay"


def _find(config: dict[str, Any], key: str) -> tuple[dict[str, Any] | None, str]:
    *parents, last = key.split(".")
    section: Any = config
    for parent in parents:
        section = section.get(parent) if isinstance(section, dict) else None
    return (section if isinstance(section, dict) else None), last


def _value(config: dict[str, Any], key: str) -> Any:
    section, last = _find(config, key)
    return None if section is None else section.get(last)


def _without_auto(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy without `auto` entries, which get DeepSpeed's own defaults."""
    return {
        key: _without_auto(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if value != AUTO
    }
