"""Selects the driver for the arguments, with its options and the kernel's settings.

All functions read arguments by attribute, so that the arguments of other libraries for HF Trainer
select a driver by the same rules. If the arguments select no driver, the launcher's environment
decides; if that selects none either, the best driver that runs on this machine is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from ...kernel.errors import CapabilityRefused, SettingError
from ...kernel.plan import Plan
from ...registry import find_driver, refuse_unpromised
from ...trainer.setting_values import override
from ...trainer.settings import Settings
from ..errors import ArgumentError, ArgumentRefused
from . import deepspeed, fsdp
from .launcher import PRECISIONS, from_environment, launched
from .options import accelerator_of, driver_options, notes
from .parallelism import wants_mesh
from .values import read_mapping

__all__ = [
    "Choice",
    "chosen",
    "deepspeed_facts",
    "describe",
    "expected_device",
    "mixed_precision",
    "notes",
    "planned",
    "ranks_of_a_reader",
    "settings",
]


@dataclass(frozen=True)
class Choice:
    """A driver by name, its options, and the reason for it."""

    driver: str
    options: dict[str, Any]
    why: str


class EffectiveArguments:
    """The arguments, with the launcher's values for arguments that are not set."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self.launcher = from_environment()
        if any(getattr(args, name, False) for name in PRECISIONS):
            self.launcher = {k: v for k, v in self.launcher.items() if k not in PRECISIONS}

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.args, name, None)
        return self.launcher.get(name, value) if value in _NOTHING else value

    def source(self, name: str) -> str:
        """Describe a value and its source, for errors."""
        by_launcher = name in self.launcher and getattr(self.args, name, None) in _NOTHING
        value = self.launcher[name] if by_launcher else getattr(self.args, name)
        shown = "a dict" if isinstance(value, dict) else repr(value)
        return f"{name}={shown}" + (" (from the launcher)" if by_launcher else "")


_NOTHING: tuple[Any, ...] = (None, False, "", [], {})


def chosen(args: Any, model: nn.Module | None = None) -> Choice:
    """Select the driver and its options. `model` refines defaults that depend on it.

    Raises `ArgumentError`, naming both sources, if two sources contradict each other.
    """
    effective = EffectiveArguments(args)
    driver, why = _driver(effective)
    derived, defaults = driver_options(effective, driver, model)
    given = read_mapping(getattr(args, "backend_options", None), "backend_options")
    for name, value in given.items():
        if derived.get(name, value) != value:
            raise ArgumentError(
                f"backend_options[{name!r}] is {value!r}, and other arguments ask for "
                f"{derived[name]!r}; remove one of them"
            )
    options = {**defaults, **derived, **given}
    with _argument_errors():
        override(find_driver(driver).options_type(), options, "backend_options.")
    return Choice(driver, options, why)


def settings(args: Any, model: nn.Module | None = None) -> Settings:
    """Return the kernel's settings, except the length of training and the schedule of actions.

    Raises `ArgumentError`.
    """
    effective = EffectiveArguments(args)
    readers = max(1, launched().size // ranks_of_a_reader(args))
    batch = effective.per_device_train_batch_size
    if getattr(effective.accelerator_config, "split_batches", False):
        batch //= readers
    precision = mixed_precision(args)
    with _argument_errors():
        return Settings(
            precision={"no": "fp32", "fp8": "float8"}.get(precision, precision),
            max_grad_norm=effective.max_grad_norm if (effective.max_grad_norm or 0) > 0 else None,
            compile=bool(effective.torch_compile),
            compile_options=_compile_options(effective),
            activation_checkpointing=fsdp.checkpointed(effective, model),
            seed=args.seed,
            timeout_seconds=float(args.ddp_timeout),
            stall_seconds=getattr(args, "stall_seconds", Settings.stall_seconds),
            global_batch=batch * readers * args.gradient_accumulation_steps,
            micro_batch=batch,
        )


def ranks_of_a_reader(args: Any) -> int:
    """Return the number of ranks that get the same samples, since they share layers, stages or
    sequences. An open session knows it."""
    session = getattr(args, "_driver_session", None)
    if session is not None and (world := session.open_world) is not None:
        return int(world.size // world.num_readers)
    options = chosen(args).options
    return math.prod(int(options.get(name, 1)) for name in ("tensor", "context", "pipeline"))


def planned(args: Any, model: nn.Module | None = None) -> Plan:
    """Return the plan for the selected driver, after a check that the driver supports all of it.

    Raises `ArgumentError`, and `ArgumentRefused` for arguments that the driver does not support.
    """
    choice = chosen(args, model)
    driver = find_driver(choice.driver)
    with _argument_errors():
        options = override(driver.options_type(), choice.options, "backend_options.")
        plan = settings(args, model).plan(options)
        untouched = args.ddp_timeout == 1800  # by default, so nobody has asked for it
        seconds = Plan.timeout_seconds if untouched else plan.timeout_seconds
        refuse_unpromised(driver, replace(plan, timeout_seconds=seconds))
    return plan


def mixed_precision(args: Any) -> str:
    """Return `no`, `fp16`, `bf16` or `fp8`; the arguments override the launcher."""
    effective = EffectiveArguments(args)
    fewer = "fp8" if effective.fp8 else "no"
    return "fp16" if effective.fp16 else "bf16" if effective.bf16 else fewer


def expected_device(args: Any) -> torch.device | None:
    """Return the device of this process; None if only the open driver knows it."""
    choice, local_rank = chosen(args), launched().local_rank
    if choice.driver in ("cpu", "ipex") or choice.options.get("device") == "cpu":
        return torch.device("cpu")
    if choice.driver == "xpu":
        return torch.device("xpu", local_rank)
    if choice.driver in ("ddp", "fsdp", "deepspeed", "mesh"):
        found = accelerator_of(choice.driver)
        return torch.device(found.type, local_rank) if found else torch.device("cpu")
    return None


def describe(args: Any) -> None:
    """Check that the driver supports the arguments, and set the attributes of `args` from which
    other libraries read about sharding. Raises `ArgumentError` and `ArgumentRefused`.
    """
    planned(args)
    effective, local_rank = EffectiveArguments(args), launched().local_rank
    if args.local_rank not in (-1, local_rank):
        raise ArgumentError(
            f"local_rank is {args.local_rank}, and by the environment (LOCAL_RANK) this is local "
            f"process {local_rank}; launch with torchrun and leave local_rank alone"
        )
    args.deepspeed_plugin = args.hf_deepspeed_config = deepspeed_facts(args)
    args.fsdp_plugin_args = fsdp.configuration(effective) if effective.fsdp else None


def deepspeed_facts(args: Any) -> deepspeed.DeepspeedFacts | None:
    """Return DeepSpeed's configuration for other libraries; None on other drivers."""
    choice = chosen(args)
    if choice.driver != "deepspeed":
        return None
    config = read_mapping(choice.options.get("config"), "backend_options['config']")
    if (stage := choice.options.get("stage")) is not None:
        config["zero_optimization"] = {**config.get("zero_optimization", {}), "stage": stage}
    size, precision = args.per_device_train_batch_size, mixed_precision(args)
    return deepspeed.DeepspeedFacts(deepspeed.completed(config, size, precision))


def _driver(effective: EffectiveArguments) -> tuple[str, str]:
    """Return the driver's name and its source."""
    found: dict[str, str] = {}
    if effective.backend:
        found[effective.backend] = effective.source("backend")
    if effective.deepspeed:
        found.setdefault("deepspeed", effective.source("deepspeed"))
    if wants_mesh(effective):
        found.setdefault("mesh", "parallelism_config")
    if effective.fsdp and "mesh" not in found:
        found.setdefault("xla" if fsdp.wants_xla(effective) else "fsdp", effective.source("fsdp"))
    if len(found) > 1:
        sides = " and ".join(f"{why} asks for {name!r}" for name, why in found.items())
        raise ArgumentError(f"{sides}, and there is one driver; remove one of them")
    if found:
        return next(iter(found.items()))
    if effective.use_cpu:
        return "ddp" if launched().size > 1 else "cpu", effective.source("use_cpu")
    if find_spec("torch_neuronx") is not None:
        raise ArgumentError(
            "this machine has torch_neuronx, and no driver computes on AWS Neuron: train by "
            "NeuronTrainer of optimum-neuron, or name a driver (backend='cpu' for the CPU)"
        )
    return find_driver("auto").name, "the best that runs on this machine"


def _compile_options(effective: EffectiveArguments) -> dict[str, Any]:
    if not effective.torch_compile:
        return {}
    given = {"backend": effective.torch_compile_backend, "mode": effective.torch_compile_mode}
    return {name: value for name, value in given.items() if value}


@contextmanager
def _argument_errors() -> Iterator[None]:
    """Convert the kernel's errors to those that users of HF Trainer catch."""
    try:
        yield
    except ArgumentError:
        raise
    except SettingError as error:
        raise ArgumentError(str(error)) from error
    except CapabilityRefused as error:
        remedy = str(error).partition(": ")[2]
        raise ArgumentRefused(error.asked, error.driver, remedy, error.capability) from error
