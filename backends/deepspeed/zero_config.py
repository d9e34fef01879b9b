"""DeepSpeed's JSON: what the user wrote, what the plan says, and where the two contradict."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...data.small_files import read_json
from ...kernel.errors import CapabilityRefused, SettingError
from ...kernel.plan import Layout, Plan

AUTO = "auto"

_REFUSED = {
    "scheduler": "the learning rate follows the settings schedule.*; remove the section",
    "amp": "set precision instead",
    "autotuning": "launch DeepSpeed's own autotuner instead",
    "checkpoint": "checkpoints follow the settings checkpoint.*; remove the section",
    "compression_training": "it changes the model in mid-training; remove the section",
    "curriculum_learning": "the order of samples is that of the recipe; remove the section",
    "data_efficiency": "the order of samples is that of the recipe; remove the section",
    "dataloader_drop_last": "set data.drop_last instead",
    "elasticity": "batches are elastic here without it; remove the section",
    "hybrid_engine": "it serves inference; remove the section",
    "load_universal_checkpoint": "resume with --resume instead",
    "pipeline": "pipelines are not driven from here; remove the section",
    "sequence_parallel_size": "data is split over all ranks; remove the key",
    "tensor_parallel": "weights are sharded by ZeRO alone; remove the section",
    "torch_autocast": "precision decides on torch.autocast; remove the section",
    "zero_optimization.mics_shard_size": "replicated shards cannot be saved; remove the key",
    "zero_optimization.zenflow": "its late updates are not the gradient's; remove the section",
    "zero_optimization.offload_optimizer.super_offload": "its state cannot be read; remove the key",
    "bf16.bf16_master_weights_and_grads": "masters are float32; remove the key",
    "bf16.bf16_optimizer_states": "the optimizer's state is float32; remove the key",
    "fp16.fp16_master_weights_and_grads": "masters are float32; remove the key",
    "fp16.auto_cast": "torch.autocast casts inputs; remove the key",
}
_SECTIONS = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16}
_NO_EFFECT: tuple[Any, ...] = (None, False, AUTO, {})

# FusedAdam and the like update each element by itself; the others need the shape of a parameter.
ELEMENTWISE = ("adam", "adamw", "lion")


def load(source: Any) -> dict[str, Any]:
    """A copy of the user's configuration: a dict, the path of a JSON file, or None."""
    if source is None:
        return {}
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source))
    try:
        loaded = read_json(source)
    except (OSError, TypeError, ValueError) as error:
        raise SettingError(
            f"backend.config is {source!r}, neither a dict nor a readable JSON file: {error}"
        ) from error
    if not isinstance(loaded, dict):
        raise SettingError(f"{source} holds a {type(loaded).__name__}, not a JSON object")
    return loaded


def stage_of(options: Any) -> int:
    """The ZeRO stage: the option, or else what the JSON says, or else 2. Raises `SettingError`."""
    written = load(options.config).get("zero_optimization", {}).get("stage", AUTO)
    if options.stage is not None and written not in (AUTO, options.stage):
        raise _conflict("zero_optimization.stage", written, "backend.stage", options.stage)
    stage = written if options.stage is None else options.stage
    stage = 2 if stage == AUTO else stage
    if stage not in (1, 2, 3):
        raise SettingError(f"the ZeRO stage is {stage!r}; allowed: 1, 2, 3 (for none take ddp)")
    return int(stage)


def resolve(options: Any, plan: Plan, size: int) -> dict[str, Any]:
    """The configuration that DeepSpeed gets in a run of `size` ranks.

    Every `auto` is filled in, a key that contradicts the plan or that would have no effect here is
    refused with both sides named. Raises `SettingError` and `CapabilityRefused`.
    """
    config = load(options.config)
    for key, remedy in _REFUSED.items():
        value = _get(config, key)
        if value not in _NO_EFFECT and not (
            isinstance(value, dict) and not value.get("enabled", 1)
        ):
            raise CapabilityRefused(f"{key}={value!r} of its JSON", "deepspeed", remedy)
    per_feeder = -(-plan.global_batch // size)
    micro_batch = plan.micro_batch or per_feeder
    accumulation = -(-per_feeder // micro_batch)
    precision = plan.precision.name
    for key, wanted, setting in (
        ("train_batch_size", plan.global_batch, "global_batch"),
        ("train_micro_batch_size_per_gpu", micro_batch, "micro_batch"),
        ("gradient_accumulation_steps", accumulation, "global_batch / micro_batch"),
        ("gradient_clipping", plan.max_grad_norm or 0.0, "max_grad_norm"),
        ("gradient_allreduce_op", "mean", "the contract"),
        ("managed_gradient_accumulation", False, "the contract"),
        ("bf16.check_grad_overflow", True, "the contract"),
        ("zero_optimization.compute_grad_norm", True, "the contract"),
        ("bfloat16.enabled", precision == "bf16", "precision"),
        ("bf16.enabled", precision == "bf16", "precision"),
        ("fp16.enabled", precision == "fp16", "precision"),
    ):
        written = _get(config, key)
        if written in (None, AUTO) or str(written).lower() == str(wanted).lower():
            continue
        if key.endswith(".enabled") and not written:
            continue  # low-precision weights are optional: autocast serves without
        if isinstance(written, float | int) and written == wanted:
            continue
        raise _conflict(key, written, setting, precision if setting == "precision" else wanted)
    for section, dtype in _SECTIONS.items():
        if _get(config, f"{section}.enabled") == AUTO:
            config[section]["enabled"] = dtype == plan.precision.compute
    zero = config.setdefault("zero_optimization", {})
    _refuse_offload(zero, stage_of(options))
    optimizer = config.pop("optimizer", None)
    config = _without_auto(config)
    config["zero_optimization"]["stage"] = stage_of(options)
    config |= {
        # the kernel accumulates: each `step` is an update, and `backward` divides by nothing
        "managed_gradient_accumulation": False,
        "gradient_accumulation_steps": 1,
        "train_micro_batch_size_per_gpu": micro_batch,
        "train_batch_size": micro_batch * size,
        "gradient_clipping": plan.max_grad_norm or 0.0,
        "zero_allow_untested_optimizer": True,
    }
    config.setdefault("zero_force_ds_cpu_optimizer", False)
    # it would replace torch.nn.functional.linear for the rest of the process, autocast or not
    config["zero_optimization"].setdefault("memory_efficient_linear", False)
    low = low_precision(config)
    if low == torch.bfloat16 and stage_of(options) == 1:
        raise CapabilityRefused(
            "bf16.enabled at ZeRO stage 1",
            "deepspeed",
            "that optimizer of DeepSpeed's steps once on nothing when it is made; take stage 2, or "
            "remove the section and let torch.autocast compute in bf16",
        )
    if low is not None:  # gradients are still summed in the plan's dtype
        config.setdefault("communication_data_type", _name(plan.precision.reduce))
        config.setdefault("data_types", {}).setdefault(
            "grad_accum_dtype", _name(plan.precision.reduce)
        )
    return {**config, **({"optimizer": optimizer} if optimizer else {})}


def low_precision(config: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype of the module's weights where it is one of 16 bits, beside float32 masters."""
    for key, dtype in _SECTIONS.items():
        if _get(config, f"{key}.enabled"):
            return dtype
    return None


def bucket_elements(config: Mapping[str, Any], num_elements: int) -> int:
    """The size of the bucket in which gradients are reduced. DeepSpeed allocates it whole, 5e8
    elements by default: here it is at most as large as the model, which is all that it can hold."""
    return int(_get(config, "zero_optimization.reduce_bucket_size") or min(5 * 10**8, num_elements))


def layout(
    config: Mapping[str, Any], plan: Plan, model: nn.Module, whole: Layout, world_size: int
) -> Layout:
    """Return the layout of the fullest rank, given the layout of a rank that holds everything
    whole.
    """
    stage, low = config["zero_optimization"]["stage"], low_precision(config)
    elements = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    weights = whole.parameter_bytes // (2 if low else 1)

    def part(num_bytes: int) -> int:
        return -(-num_bytes // world_size)

    # one bucket is filled while another is reduced
    transient = 2 * bucket_elements(config, elements) * plan.precision.reduce.itemsize
    if stage == 3:
        zero, size = config["zero_optimization"], 2 if low else 4
        live = min(zero.get("stage3_max_live_parameters", 10**9), elements)
        fetched = min(zero.get("stage3_prefetch_bucket_size", 5 * 10**7), elements)
        transient += size * int(live + fetched)
    return replace(
        whole,
        parameter_bytes=part(weights) if stage == 3 else weights,
        gradient_bytes=part(whole.gradient_bytes) if stage >= 2 else whole.gradient_bytes,
        # with float32 masters, which lie beside the weights whatever the weights are
        optimizer_bytes=part(whole.optimizer_bytes + 4 * trained),
        transient_bytes=whole.transient_bytes + transient,
        notes=(*whole.notes, f"ZeRO stage {stage}: buckets and gathered weights are at times"),
    )


def fill_optimizer(section: Mapping[str, Any], base: torch.optim.Optimizer) -> dict[str, Any]:
    """The `optimizer` section with `auto` taken from the recipe's optimizer.

    Raises `SettingError` where a learning rate or weight decay contradicts the recipe's, and
    `CapabilityRefused` for types that do not update each element by itself.
    """
    kind = str(section.get("type", ""))
    if kind.lower() not in ELEMENTWISE:
        allowed = ", ".join(ELEMENTWISE)
        raise CapabilityRefused(
            f"optimizer.type={kind!r} of its JSON",
            "deepspeed",
            f"allowed are {allowed}; or remove the section and name one in the settings",
        )
    params = dict(section.get("params", {}))
    for key, setting in (("lr", "optimizer.lr"), ("weight_decay", "optimizer.weight_decay")):
        wanted = max(float(group.get(key, 0.0)) for group in base.param_groups)
        if params.get(key, AUTO) not in (AUTO, wanted):
            raise _conflict(f"optimizer.params.{key}", params[key], setting, wanted)
        params[key] = wanted
    for key, value in params.items():
        if value == AUTO and key in base.defaults:
            params[key] = base.defaults[key]
    return {**section, "type": kind, "params": _without_auto(params)}


def swaps(config: Mapping[str, Any]) -> bool:
    """True if masters and moments lie in files between updates."""
    return bool(_get(config, "zero_optimization.offload_optimizer.device") == "nvme")


def _refuse_offload(zero: Mapping[str, Any], stage: int) -> None:
    for key in ("offload_optimizer", "offload_param"):
        section = zero.get(key) or {}
        where = f"zero_optimization.{key}"
        if section.get("ratio", 1.0) != 1.0:
            raise CapabilityRefused(
                f"{where}.ratio={section['ratio']}",
                "deepspeed",
                "a second optimizer would hold a part of the state; leave the ratio at 1.0",
            )
        if section.get("device") != "nvme":
            continue
        if key == "offload_param":
            remedy = "weights are sharded while the model is made, in memory; offload them to 'cpu'"
            raise CapabilityRefused(f"{where}.device='nvme'", "deepspeed", remedy)
        if stage != 3:
            remedy = "DeepSpeed would keep it in memory at this stage; take stage 3, or 'cpu'"
            raise CapabilityRefused(f"{where}.device='nvme' at stage {stage}", "deepspeed", remedy)
        if section.get("pipeline_read") or section.get("pipeline_write"):
            remedy = "what is on its way cannot be saved; remove pipeline_read and pipeline_write"
            raise CapabilityRefused(f"{where} in a pipeline", "deepspeed", remedy)
        if not os.path.isdir(section.get("nvme_path") or ""):
            raise SettingError(
                f"{where}.nvme_path is {section.get('nvme_path')!r}, which is no folder; name one "
                "on the disk that is to hold the optimizer's state"
            )


def _conflict(key: str, written: Any, setting: str, wanted: Any) -> SettingError:
    return SettingError(
        f"{key} is {written!r} in the DeepSpeed JSON, and {setting} asks for {wanted!r}; "
        f"make them equal, or write {AUTO!r} in the JSON"
    )


def _get(config: Mapping[str, Any], dotted: str) -> Any:
    value: Any = config
    for part in dotted.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _without_auto(section: Mapping[str, Any]) -> dict[str, Any]:
    """`auto` where nothing is planned leaves DeepSpeed's own default."""
    return {
        key: _without_auto(value) if isinstance(value, Mapping) else value
        for key, value in section.items()
        if value != AUTO
    }


def _name(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
