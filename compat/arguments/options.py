"""The options of each driver derived from the arguments, and arguments without effect on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...registry import accelerators, find_driver
from ..errors import ArgumentError, ArgumentRefused
from . import deepspeed, fsdp, parallelism
from .launcher import launched

__all__ = ["accelerator_of", "driver_options", "notes", "refuse_kernels"]

Options = dict[str, Any]

_DDP = {
    "ddp_bucket_cap_mb": "bucket_cap_mb",
    "ddp_broadcast_buffers": "sync_buffers",
    "ddp_find_unused_parameters": "find_unused_parameters",
    "ddp_static_graph": "static_graph",
}
"""Arguments about replicas, and the options of drivers that keep replicas."""


def driver_options(asked: Any, driver: str, model: nn.Module | None) -> tuple[Options, Options]:
    """Return the options that the arguments set, and the defaults of HF that differ from the
    driver's.

    Raises `ArgumentError`, and `ArgumentRefused` for arguments that the driver does not support.
    """
    known = {item.name for item in fields(find_driver(driver).options_type)}
    derived: Options = {}
    defaults: Options = {}
    for argument, option in _DDP.items():
        value = getattr(asked, argument)
        if value is not None and option in known:
            derived[option] = value
    if "find_unused_parameters" in known:
        defaults["find_unused_parameters"] = not _recomputes(asked, model)
    if asked.use_cpu:
        derived |= _on_cpu(driver, known)
    if driver == "fsdp" or (driver == "mesh" and asked.fsdp):
        derived |= fsdp.options(asked)
        if "shard_size" in derived and driver == "mesh":
            raise ArgumentRefused(
                "a hybrid strategy of fsdp", driver, "set parallelism_config.dp_replicate_size"
            )
        if _syncs_each_batch(asked):
            derived["sync_each_microbatch"] = True
    elif driver == "deepspeed" and asked.deepspeed:
        derived |= deepspeed.options(asked)
    elif driver == "xla" and asked.fsdp:
        derived |= _xla(asked)
    if driver == "deepspeed":
        defaults["construct"] = "whole"  # the model is built before the Trainer
    derived |= parallelism.options(asked, driver)
    _refuse_library(asked, driver, derived)
    return derived, defaults


_WITHOUT_TRITON = ("cpu", "ipex", "xla")


def refuse_kernels(asked: Any, driver: str) -> None:
    """Raises `ArgumentRefused` if training needs kernels that the driver cannot run."""
    if asked.use_liger_kernel and driver in _WITHOUT_TRITON:
        raise ArgumentRefused("use_liger_kernel", driver, "these kernels run on GPUs alone")


def notes(asked: Any, driver: str) -> Iterator[str]:
    """Yield one line for each argument that has no effect on the driver, with the reason."""
    known = {item.name for item in fields(find_driver(driver).options_type)}
    for argument, option in _DDP.items():
        if getattr(asked, argument, None) is not None and option not in known:
            reason = _WITHOUT_REPLICAS.get(driver, "it keeps no replicas of its own")
            yield f"{argument} has no effect on {driver}: {reason}"
    if asked.use_liger_kernel and driver in _WITHOUT_TRITON:
        yield (
            f"use_liger_kernel has no effect on {driver} while evaluating: these kernels run on "
            "GPUs alone, and train() is refused"
        )
    if driver == "fsdp":
        yield from fsdp.notes(asked)
    if driver == "mesh":
        yield from parallelism.notes(asked)
    if getattr(asked, "fsdp_config", None) and not asked.fsdp and driver not in ("fsdp", "xla"):
        yield f"fsdp_config has no effect on {driver}: fsdp is not set"
    if "tpu_metrics_debug" in (getattr(asked, "debug", None) or ()) and driver != "xla":
        yield f"debug=tpu_metrics_debug has no effect on {driver}: it counts what XLA does"
    if _syncs_each_batch(asked) and driver != "fsdp":
        yield (
            f"accelerator_config.gradient_accumulation_kwargs.sync_each_batch has no effect on "
            f"{driver}: the gradient is the same, and is averaged once an update"
        )
    yield from _idle_devices(asked, driver)
    if getattr(asked, "sortish_sampler", False):
        yield "sortish_sampler has no effect: set train_sampling_strategy='group_by_length'"
    if getattr(asked, "torch_empty_cache_steps", None) and driver in ("cpu", "ipex"):
        yield f"torch_empty_cache_steps has no effect on {driver}: the host has no such cache"


def _idle_devices(asked: Any, driver: str) -> Iterator[str]:
    """Report devices of this machine that will stay idle, unless the arguments ask for that."""
    if asked.use_cpu or driver not in ("cpu", "ddp", "fsdp", "deepspeed"):
        return
    found = torch.accelerator.current_accelerator(check_available=True)
    num_gpus = len(accelerators(find_driver(driver).probe()))
    if found is not None and not num_gpus:
        yield (
            f"{driver} does not compute on {found.type}: training on the CPU. Set "
            "backend='accelerator', or use_cpu=True"
        )
    if driver != "cpu" and launched().size == 1 and num_gpus > 1:
        yield (
            f"one of {num_gpus} GPUs is used: a process trains on one device, and there is no "
            f"DataParallel. Start a process for each by torchrun --nproc-per-node={num_gpus}"
        )


_WITHOUT_REPLICAS = {
    "cpu": "one process has nobody to average gradients with",
    "ipex": "one process has nobody to average gradients with",
    "xla": "the compiler places collectives",
    "fsdp": "gradients are summed unit by unit, used or not",
    "deepspeed": "its configuration says how gradients travel",
}


def _syncs_each_batch(asked: Any) -> bool:
    kwargs = getattr(asked.accelerator_config, "gradient_accumulation_kwargs", None) or {}
    return bool(kwargs.get("sync_each_batch"))


def _recomputes(asked: Any, model: nn.Module | None) -> bool:
    """True if activations are recomputed: a search for unused parameters would break that."""
    enabled = getattr(model, "is_gradient_checkpointing", False)
    return bool(asked.activation_checkpointing or asked.gradient_checkpointing or enabled)


def _on_cpu(driver: str, known: set[str]) -> Options:
    if driver in ("cpu", "ipex"):
        return {}
    if driver == "xla":
        return {"platform": "CPU"}
    if "device" not in known:
        raise ArgumentRefused("use_cpu", driver, "choose backend='cpu', or leave use_cpu out")
    return {"device": "cpu"}


def _xla(asked: Any) -> Options:
    """Return the options for XLA's own FSDP, of either version: the driver shards by itself."""
    given = fsdp.configuration(asked).get("xla_fsdp_settings")
    if given:
        raise ArgumentError(
            f"fsdp_config['xla_fsdp_settings'] is {given!r}: the compiler decides on sharding; "
            "remove it, and set bf16 for the dtype"
        )
    return {"spmd": True}


def accelerator_of(driver: str) -> torch.device | None:
    """Return the type of this machine's accelerators if the driver computes on them."""
    is_used = accelerators(find_driver(driver).probe())
    return torch.accelerator.current_accelerator() if is_used else None


def _refuse_library(asked: Any, driver: str, derived: Options) -> None:
    """Refuse a communication library that does not serve the device."""
    wanted = asked.ddp_backend
    if wanted is None or driver in ("cpu", "ipex", "xla"):
        return
    found = None if derived.get("device") == "cpu" else accelerator_of(driver)
    serves = dist.get_default_backend_for_device(found or "cpu")
    if wanted not in (serves, "ccl" if serves == "xccl" else serves):
        raise ArgumentRefused(
            f"ddp_backend={wanted!r}", driver, f"on this device processes communicate by {serves}"
        )
