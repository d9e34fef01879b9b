"""Chooses the driver for the arguments, with its options and the kernel's settings.

Everything here reads arguments by attribute, so that the arguments of other libraries, made for HF
Trainer, choose a driver by the same rules. Where they leave it open, the launcher's environment
decides, and where that does too, the best driver that runs on this machine.
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
from ...kernel.registry import find_driver, refuse_unpromised
from ...trainer.setting_values import override
from ...trainer.settings import Settings
from ..errors import ArgumentError, ArgumentRefused
from . import deepspeed, fsdp
from .launcher import PRECISIONS, from_environment, launched
from .options import driver_options, notes
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
    """A driver by name, its options, and what decided."""

    driver: str
    options: dict[str, Any]
    why: str


class Asked:
    """The arguments; where one is not set, the value given to the launcher."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self.launcher = from_environment()
        if any(getattr(args, name, False) for name in PRECISIONS):
            self.launcher = {k: v for k, v in self.launcher.items() if k not in PRECISIONS}

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.args, name, None)
        return self.launcher.get(name, value) if value in _NOTHING else value

    def source(self, name: str) -> str:
        """A value and who gave it, for errors."""
        by_launcher = name in self.launcher and getattr(self.args, name, None) in _NOTHING
        value = self.launcher[name] if by_launcher else getattr(self.args, name)
        shown = "a dict" if isinstance(value, dict) else repr(value)
        return f"{name}={shown}" + (" (from the launcher)" if by_launcher else "")


_NOTHING: tuple[Any, ...] = (None, False, "", [], {})


def chosen(args: Any, model: nn.Module | None = None) -> Choice:
    """The driver, its options and why; `model` refines defaults that depend on it.

    Raises `ArgumentError` where two of those who decide ask for different things, naming both.
    """
    asked = Asked(args)
    driver, why = _driver(asked)
    derived, defaults = driver_options(asked, driver, model)
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
    """The kernel's settings, apart from how long to train and when to do what.

    Raises `ArgumentError`.
    """
    asked, readers = Asked(args), max(1, launched().size // ranks_of_a_reader(args))
    batch = asked.per_device_train_batch_size
    if getattr(asked.accelerator_config, "split_batches", False):
        batch //= readers
    precision = mixed_precision(args)
    with _argument_errors():
        return Settings(
            precision={"no": "fp32", "fp8": "float8"}.get(precision, precision),
            max_grad_norm=asked.max_grad_norm if (asked.max_grad_norm or 0) > 0 else None,
            compile=bool(asked.torch_compile),
            compile_options=_compile_options(asked),
            activation_checkpointing=fsdp.checkpointed(asked, model),
            seed=args.seed,
            timeout_seconds=float(args.ddp_timeout),
            stall_seconds=getattr(args, "stall_seconds", Settings.stall_seconds),
            global_batch=batch * readers * args.gradient_accumulation_steps,
            micro_batch=batch,
        )


def ranks_of_a_reader(args: Any) -> int:
    """How many ranks see the same samples, since they share layers, stages or sequences: the
    session knows, where one is open."""
    session = getattr(args, "_driver_session", None)
    if session is not None and (world := session.open_world) is not None:
        return int(world.size // world.num_readers)
    options = chosen(args).options
    return math.prod(int(options.get(name, 1)) for name in ("tensor", "context", "pipeline"))


def planned(args: Any, model: nn.Module | None = None) -> Plan:
    """The plan that the chosen driver gets, all of which it promises to do.

    Raises `ArgumentError`, and `ArgumentRefused` for what the driver cannot do.
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
    """`no`, `fp16`, `bf16` or `fp8`; the arguments beat the launcher."""
    asked = Asked(args)
    fewer = "fp8" if asked.fp8 else "no"
    return "fp16" if asked.fp16 else "bf16" if asked.bf16 else fewer


def expected_device(args: Any) -> torch.device | None:
    """The device of this process, or None where only the open driver knows it."""
    choice, local_rank = chosen(args), launched().local_rank
    if choice.driver in ("cpu", "ipex") or choice.options.get("device") == "cpu":
        return torch.device("cpu")
    if choice.driver == "xpu":
        return torch.device("xpu", local_rank)
    if choice.driver in ("ddp", "fsdp", "deepspeed", "mesh"):
        has_gpu = torch.cuda.device_count() > 0
        return torch.device("cuda", local_rank) if has_gpu else torch.device("cpu")
    return None


def describe(args: Any) -> None:
    """Check that the driver can do what is asked for, and give `args` the attributes by which
    other libraries ask about sharding. Raises `ArgumentError` and `ArgumentRefused`.
    """
    planned(args)
    asked, local_rank = Asked(args), launched().local_rank
    if args.local_rank not in (-1, local_rank):
        raise ArgumentError(
            f"local_rank is {args.local_rank}, and by the environment (LOCAL_RANK) this is local "
            f"process {local_rank}; launch with torchrun and leave local_rank alone"
        )
    args.deepspeed_plugin = args.hf_deepspeed_config = deepspeed_facts(args)
    args.fsdp_plugin_args = fsdp.configuration(asked) if asked.fsdp else None


def deepspeed_facts(args: Any) -> deepspeed.DeepspeedFacts | None:
    """DeepSpeed's configuration, as other libraries ask for it; None on other drivers."""
    choice = chosen(args)
    if choice.driver != "deepspeed":
        return None
    config = read_mapping(choice.options.get("config"), "backend_options['config']")
    if (stage := choice.options.get("stage")) is not None:
        config["zero_optimization"] = {**config.get("zero_optimization", {}), "stage": stage}
    size, precision = args.per_device_train_batch_size, mixed_precision(args)
    return deepspeed.DeepspeedFacts(deepspeed.completed(config, size, precision))


def _driver(asked: Asked) -> tuple[str, str]:
    """The driver's name and who decided."""
    found: dict[str, str] = {}
    if asked.backend:
        found[asked.backend] = asked.source("backend")
    if asked.deepspeed:
        found.setdefault("deepspeed", asked.source("deepspeed"))
    if wants_mesh(asked):
        found.setdefault("mesh", "parallelism_config")
    if asked.fsdp and "mesh" not in found:
        found.setdefault("xla" if fsdp.wants_xla(asked) else "fsdp", asked.source("fsdp"))
    if len(found) > 1:
        sides = " and ".join(f"{why} asks for {name!r}" for name, why in found.items())
        raise ArgumentError(f"{sides}, and there is one driver; remove one of them")
    if found:
        return next(iter(found.items()))
    if asked.use_cpu:
        return "ddp" if launched().size > 1 else "cpu", asked.source("use_cpu")
    if find_spec("torch_neuronx") is not None:
        raise ArgumentError(
            "this machine has torch_neuronx, and no driver computes on AWS Neuron: train by "
            "NeuronTrainer of optimum-neuron, or name a driver (backend='cpu' for the CPU)"
        )
    return find_driver("auto").name, "the best that runs on this machine"


def _compile_options(asked: Asked) -> dict[str, Any]:
    given = {"backend": asked.torch_compile_backend, "mode": asked.torch_compile_mode}
    return {name: value for name, value in given.items() if value} if asked.torch_compile else {}


@contextmanager
def _argument_errors() -> Iterator[None]:
    """The kernel's errors as those that HF Trainer's users catch."""
    try:
        yield
    except ArgumentError:
        raise
    except SettingError as error:
        raise ArgumentError(str(error)) from error
    except CapabilityRefused as error:
        remedy = str(error).partition(": ")[2]
        raise ArgumentRefused(error.asked, error.driver, remedy, error.capability) from error
