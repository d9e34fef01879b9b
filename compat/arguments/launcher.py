"""The launcher's environment variables, read as arguments.

torchrun's variables identify this process; `accelerate launch` also passes its flags and its YAML
as variables. Arguments override the launcher.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from ..errors import ArgumentError
from .values import truth

__all__ = ["PARALLEL_SIZES", "Launched", "from_environment", "launched", "parallel_sizes"]


@dataclass(frozen=True)
class Launched:
    """The ranks of this process and the world size, globally and on its machine."""

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    local_size: int = 1


def launched(environ: Mapping[str, str] | None = None) -> Launched:
    """Return the ranks from the environment; a single process if there was no launcher. Raises
    `ArgumentError`."""
    env = os.environ if environ is None else environ
    size = _number(env, "WORLD_SIZE", 1)
    return Launched(
        rank=_number(env, "RANK", 0),
        local_rank=_number(env, "LOCAL_RANK", 0),
        size=size,
        local_size=_number(env, "LOCAL_WORLD_SIZE", size),
    )


def from_environment(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return argument -> value from the variables of `accelerate launch`, and `DRIVETRAIN_BACKEND`.

    Raises `ArgumentError` for variables that are not supported.
    """
    env = os.environ if environ is None else environ
    arguments: dict[str, Any] = {}
    for variable, why in _REFUSED.items():
        if truth(env.get(variable, ""), variable):
            raise ArgumentError(f"{variable}={env[variable]} in the environment is refused: {why}")
    _refuse_sagemaker(env)
    if "DRIVETRAIN_BACKEND" in env:
        arguments["backend"] = env["DRIVETRAIN_BACKEND"]
    elif truth(env.get("ACCELERATE_USE_IPEX", ""), "ACCELERATE_USE_IPEX"):
        arguments["backend"] = "ipex"
    if truth(env.get("ACCELERATE_USE_CPU", ""), "ACCELERATE_USE_CPU"):
        arguments["use_cpu"] = True
    if (precision := env.get("ACCELERATE_MIXED_PRECISION", "no").lower()) != "no":
        arguments[precision_argument(precision, env.get("ACCELERATE_FP8_BACKEND"))] = True
    if truth(env.get("ACCELERATE_USE_FSDP", ""), "ACCELERATE_USE_FSDP"):
        arguments |= {"fsdp": True, "fsdp_config": _fsdp(env)}
    if truth(env.get("ACCELERATE_USE_DEEPSPEED", ""), "ACCELERATE_USE_DEEPSPEED"):
        arguments["deepspeed"] = _deepspeed(env)
    if truth(env.get("ACCELERATE_USE_PARALLELISM_CONFIG", ""), "ACCELERATE_USE_PARALLELISM_CONFIG"):
        prefix = "PARALLELISM_CONFIG_"
        arguments["parallelism_config"] = parallel_sizes(
            {k.removeprefix(prefix).lower(): v for k, v in env.items() if k.startswith(prefix)}
        )
    dynamo = {
        name.removeprefix("ACCELERATE_DYNAMO_").lower(): value
        for name, value in env.items()
        if name.startswith("ACCELERATE_DYNAMO_")
    }
    return arguments | compile_arguments(dynamo)


PRECISIONS = ("fp16", "bf16", "fp8")
"""Arguments of which at most one may be True."""


def precision_argument(name: str, of_fp8: str | None = None) -> str:
    """Return the argument for the launcher's precision: `bf16`, `fp16` or `fp8`. `of_fp8`: the
    library for `fp8`. Raises `ArgumentError` for any other precision, and for `fp8` by another
    library than torchao."""
    if name not in PRECISIONS:
        raise ArgumentError(f"mixed precision {name!r} is refused; allowed: no, fp16, bf16, fp8")
    if name == "fp8" and (of_fp8 or "AO").upper() not in ("AO", "NO"):
        raise ArgumentError(f"fp8 by {of_fp8} is refused: it is torchao's here; set the backend AO")
    return name


def compile_arguments(dynamo: Mapping[str, Any]) -> dict[str, Any]:
    """Convert accelerate's dynamo settings, without their prefix, to arguments of torch.compile."""
    name = str(dynamo.get("backend", "no")).lower()
    if name == "no":
        return {}
    for key in ("use_dynamic", "use_fullgraph", "use_regional_compilation"):
        if truth(dynamo.get(key, False), f"dynamo_{key}"):
            raise ArgumentError(f"dynamo_{key} is refused: the model is compiled whole, as it is")
    mode = dynamo.get("mode")
    return {
        "torch_compile": True,
        "torch_compile_backend": name,
        "torch_compile_mode": None if mode in (None, "default") else mode,
    }


PARALLEL_SIZES = ("dp_replicate_size", "dp_shard_size", "cp_size", "sp_size", "tp_size")
"""Sizes of accelerate's `ParallelismConfig`."""


def parallel_sizes(given: Mapping[str, Any]) -> Any:
    """Convert these sizes, strings or numbers, to a `parallelism_config`. Raises
    `ArgumentError`."""
    try:
        return SimpleNamespace(**{name: int(given.get(name) or 1) for name in PARALLEL_SIZES})
    except ValueError as error:
        raise ArgumentError(f"parallelism_config has a size that is no number: {error}") from None


_REFUSED = {
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM is not driven; use fsdp or deepspeed",
    "XLA_USE_BF16": "write bf16=True",
    "XLA_DOWNCAST_BF16": "write bf16=True",
}


def _refuse_sagemaker(env: Mapping[str, str]) -> None:
    """Raise `ArgumentError` for SageMaker's own libraries for data and model parallelism."""
    for variable, key in _SAGEMAKER.items():
        try:
            asked = json.loads(env.get(variable, "{}"))
        except json.JSONDecodeError:
            continue  # not a variable of SageMaker
        if isinstance(asked, dict) and asked.get(key):
            raise ArgumentError(
                f"{variable} in the environment has {key}: SageMaker's own parallelism is not "
                "driven. Give the estimator distribution={'torch_distributed': {'enabled': True}}, "
                "by which torchrun starts the processes, and choose ddp, fsdp or deepspeed"
            )


_SAGEMAKER = {
    "SM_FRAMEWORK_PARAMS": "sagemaker_distributed_dataparallel_enabled",
    "SM_HP_MP_PARAMETERS": "partitions",
}


def _fsdp(env: Mapping[str, str]) -> dict[str, Any]:
    """Return `fsdp_config` from the variables: `FSDP_MIN_NUM_PARAMS` is `min_num_params`, and so
    on."""
    return {
        name.removeprefix("FSDP_").lower(): value
        for name, value in env.items()
        if name.startswith("FSDP_") and value not in ("", "None")
    }


def _deepspeed(env: Mapping[str, str]) -> Any:
    """Return the path of DeepSpeed's JSON, or the configuration from the variables."""
    prefix = "ACCELERATE_DEEPSPEED_"
    if path := env.get(prefix + "CONFIG_FILE"):
        return path
    given = {
        name.removeprefix(prefix).lower(): value
        for name, value in env.items()
        if name.startswith(prefix)
    }
    for name in ("gradient_accumulation_steps", "gradient_clipping"):
        if f"ACCELERATE_{name.upper()}" in env:
            given[name] = env[f"ACCELERATE_{name.upper()}"]
    return deepspeed_configuration(given)


def deepspeed_configuration(given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert accelerate's few DeepSpeed settings to DeepSpeed's own configuration."""
    zero: dict[str, Any] = {"stage": int(given.get("zero_stage", 2))}
    for part in ("optimizer", "param"):
        device = str(given.get(f"offload_{part}_device", "none")).lower()
        if device != "none":
            zero[f"offload_{part}"] = {"device": device}
    if "zero3_save_16bit_model" in given and zero["stage"] == 3:
        gather = truth(given["zero3_save_16bit_model"], "zero3_save_16bit_model")
        zero["stage3_gather_16bit_weights_on_model_save"] = gather
    configuration: dict[str, Any] = {"zero_optimization": zero}
    for name, number in (("gradient_accumulation_steps", int), ("gradient_clipping", float)):
        if str(given.get(name, "none")).lower() not in ("none", "auto"):
            configuration[name] = number(given[name])
    return configuration


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    try:
        return int(env.get(name, default))
    except ValueError:
        raise ArgumentError(
            f"{name} is {env[name]!r} in the environment; the launcher must give a number"
        ) from None
