"""Reads an `accelerate config` file as arguments, for scripts started without accelerate's
launcher.

`TrainingArguments("out", **from_accelerate_config("config.yaml"))`. Every key is mapped, agrees
with how this process was launched, or is refused by name.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...data.small_files import read_table
from ..arguments.launcher import (
    PARALLEL_SIZES,
    compile_arguments,
    deepspeed_configuration,
    launched,
    parallel_sizes,
    precision_argument,
)
from ..arguments.values import truth
from ..errors import ArgumentError

__all__ = ["from_accelerate_config"]

_DRIVERS = {
    "NO": None,
    "MULTI_CPU": "ddp",
    "MULTI_GPU": "ddp",
    "MULTI_XPU": "xpu",
    "XLA": "xla",
    "TPU": "xla",
    "FSDP": None,
    "DEEPSPEED": None,
}
"""Arguments that follow from a distributed type; FSDP and DeepSpeed have sections of their own."""

_LAUNCHER = (
    "debug",
    "enable_cpu_affinity",
    "gpu_ids",
    "main_process_ip",
    "main_process_port",
    "main_training_function",
    "rdzv_backend",
    "same_network",
)
"""Keys about launching processes, which are launched already."""

_REFUSED = {
    "command_file": "start the command on each machine with torchrun",
    "commands": "start the command on each machine with torchrun",
    "megatron_lm_config": "Megatron-LM is not driven; use FSDP or DEEPSPEED",
    "mpirun_config": "start processes with torchrun",
    "sagemaker_inputs_file": "SageMaker is not driven",
    "sagemaker_metrics_file": "SageMaker is not driven",
    "tpu_name": "start the script on the TPU's hosts",
    "tpu_use_cluster": "start the script on the TPU's hosts",
    "tpu_use_sudo": "start the script on the TPU's hosts",
    "tpu_vm": "start the script on the TPU's hosts",
    "tpu_zone": "start the script on the TPU's hosts",
}
_MAPPED = (
    "compute_environment",
    "deepspeed_config",
    "distributed_type",
    "downcast_bf16",
    "dynamo_config",
    "fp8_config",
    "fsdp_config",
    "ipex_config",
    "machine_rank",
    "mixed_precision",
    "num_machines",
    "num_processes",
    "parallelism_config",
    "tpu_env",
    "use_cpu",
)
_DEEPSPEED = (
    "deepspeed_config_file",
    "deepspeed_multinode_launcher",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "offload_optimizer_device",
    "offload_optimizer_nvme_path",
    "offload_param_device",
    "offload_param_nvme_path",
    "zero3_init_flag",
    "zero3_save_16bit_model",
    "zero_stage",
)
_FP8 = ("backend", "enable_fsdp_float8_all_gather", "pad_inner_dim")
"""accelerate's torchao settings: the backend, and how weights and tokens are moved."""
_PARALLEL = (
    *PARALLEL_SIZES,
    "cp_backend",
    "cp_comm_strategy",
    "sp_attn_implementation",
    "sp_backend",
    "sp_seq_length",
    "sp_seq_length_is_variable",
)
"""Keys besides the sizes: settings of accelerate's own implementations."""
_NOTHING: tuple[Any, ...] = (None, "", "no", "NO", "none", "null", False, [], {})


def from_accelerate_config(path: str | Path) -> dict[str, Any]:
    """Return argument -> value for a YAML or JSON file that `accelerate config` wrote.

    Raises `ArgumentError` for keys that do not exist or are not supported, and if the file asks for
    another number of processes.
    """
    config = _read(path)
    known = (*_MAPPED, *_LAUNCHER, *_REFUSED)
    for key, value in config.items():
        _check_known(key, known, path)
        if key in _REFUSED and value not in _NOTHING:
            raise ArgumentError(f"{key}={value!r} in {path} is refused: {_REFUSED[key]}")
    _check_machine(config, path)
    found: dict[str, Any] = {}
    kind = str(config.get("distributed_type", "NO")).upper()
    if kind not in _DRIVERS:
        allowed = ", ".join(_DRIVERS)
        raise ArgumentError(f"distributed_type is {kind} in {path}; driven are {allowed}")
    if sizes := _parallel_sizes(config.get("parallelism_config"), path):
        found["parallelism_config"] = parallel_sizes(sizes)
    if (driver := _DRIVERS[kind]) and not (sizes and driver == "ddp"):  # sizes choose, too
        found["backend"] = driver
    if truth((config.get("ipex_config") or {}).get("ipex", False), "ipex_config.ipex"):
        found["backend"] = "ipex"
    if truth(config.get("use_cpu", False), "use_cpu") or kind == "MULTI_CPU":
        found["use_cpu"] = True
    if (precision := str(config.get("mixed_precision") or "no").lower()) != "no":
        found[precision_argument(precision, _fp8_backend(config.get("fp8_config"), path))] = True
    if truth(config.get("downcast_bf16", False), "downcast_bf16"):
        found["bf16"] = True
    if kind == "FSDP":
        found |= {"fsdp": True, "fsdp_config": _without("fsdp_", config.get("fsdp_config"))}
    if kind == "DEEPSPEED":
        found["deepspeed"] = _deepspeed(config.get("deepspeed_config") or {}, path)
    dynamo = _without("dynamo_", config.get("dynamo_config"))
    return found | compile_arguments(dynamo)


def _read(path: str | Path) -> Mapping[str, Any]:
    try:
        loaded = read_table(Path(path), default=".yaml")
    except ImportError as error:
        raise ArgumentError(f"{path} is YAML; to read it: pip install pyyaml") from error
    except ValueError as error:
        raise ArgumentError(f"{path} cannot be read: {error!s:.400}") from error
    if not isinstance(loaded, dict):
        raise ArgumentError(f"{path} holds a {type(loaded).__name__}, not keys and values")
    return loaded


def _check_known(key: str, known: tuple[str, ...], path: object) -> None:
    if key not in known:
        near = difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
        raise ArgumentError(f"{path} has the unknown key {key!r}; {hint}")


def _check_machine(config: Mapping[str, Any], path: object) -> None:
    """Compare the number of processes in the file with the number that was launched."""
    where = str(config.get("compute_environment", "LOCAL_MACHINE"))
    if where != "LOCAL_MACHINE":
        raise ArgumentError(f"compute_environment is {where} in {path}; driven is LOCAL_MACHINE")
    if config.get("tpu_env") not in _NOTHING:
        raise ArgumentError(f"tpu_env in {path} is refused: set these variables yourself")
    wanted, size = int(config.get("num_processes") or 1), launched().size
    if wanted not in (-1, size):
        machines = int(config.get("num_machines") or 1)
        flags = f"--nproc-per-node={wanted // machines}"
        flags += f" --nnodes={machines}" if machines > 1 else ""
        raise ArgumentError(
            f"num_processes is {wanted} in {path}, and this is 1 of {size}; launch with "
            f"torchrun {flags}"
        )


def _without(prefix: str, section: Mapping[str, Any] | None) -> dict[str, Any]:
    return {key.removeprefix(prefix): value for key, value in (section or {}).items()}


def _parallel_sizes(section: Mapping[str, Any] | None, path: object) -> dict[str, Any]:
    """Return the parallel sizes; None if only the data are partitioned."""
    sizes = _without("parallelism_config_", section)
    for key in sizes:
        _check_known(key, _PARALLEL, f"parallelism_config in {path}")
    return sizes if any(sizes.get(name) not in (None, 1) for name in PARALLEL_SIZES) else {}


def _fp8_backend(section: Mapping[str, Any] | None, path: object) -> str | None:
    backend = (section or {}).get("backend")
    for key in section or {} if str(backend or "AO").upper() == "AO" else ():
        _check_known(key, _FP8, f"fp8_config in {path}")
    return backend


def _deepspeed(section: Mapping[str, Any], path: object) -> Any:
    for key in section:
        _check_known(key, _DEEPSPEED, f"deepspeed_config in {path}")
    if file := section.get("deepspeed_config_file"):
        return file
    return deepspeed_configuration(section)
