"""Converts `fsdp` and `fsdp_config` to options of the fsdp driver.

HF has two generations of these arguments: words in `fsdp`, for the first version of FSDP, and a
dict for the second. Both are merged in one dict here; the driver uses FSDP2.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from torch import nn

from ..errors import ArgumentError
from .launcher import launched
from .values import read_mapping, truth

__all__ = ["FsdpFacts", "checkpointed", "configuration", "notes", "options", "wants_xla"]

_STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
"""The strategies in accelerate's order, which is numbered from 1."""

_ALIASES = {
    "offload_params": "cpu_offload",
    "transformer_cls_to_wrap": "transformer_layer_cls_to_wrap",
    "backward_prefetch_policy": "backward_prefetch",
}
_MAPPED = (
    "activation_checkpointing",
    "auto_wrap_policy",
    "cpu_offload",
    "cpu_ram_efficient_loading",
    "min_num_params",
    "reshard_after_forward",
    "sharding_strategy",
    "state_dict_type",
    "sync_module_states",
    "transformer_layer_cls_to_wrap",
    "version",
    "xla",
    "xla_fsdp_grad_ckpt",
    "xla_fsdp_settings",
    "xla_fsdp_v2",
)
_BUILT_IN: dict[str, tuple[tuple[str, ...], str]] = {
    "backward_prefetch": (("backward_pre",), "units are gathered ahead in the backward pass"),
    "forward_prefetch": (("false",), "the forward pass gathers a unit when it begins"),
    "limit_all_gathers": (("true",), "gathers are always limited"),
    "use_orig_params": (("true",), "the model's own parameters are always kept"),
}
"""Key -> the values that FSDP2 always fulfils, and what it does for any value."""
_REFUSED = {
    "activation_checkpointing_offload": "activations are recomputed, not moved to the host",
    "ignored_modules": "every parameter is sharded",
    "mixed_precision_policy": "set bf16 or fp16",
}
_NOTHING: tuple[Any, ...] = (None, "", "none", "None", "false", "False", False, 0, {}, [], ())


def configuration(args: Any) -> dict[str, Any]:
    """Return `fsdp_config` with plain keys, merged with the words in `fsdp`.

    Raises `ArgumentError` for a key or word that does not exist or is not supported.
    """
    config: dict[str, Any] = {}
    for key, value in read_mapping(args.fsdp_config, "fsdp_config").items():
        plain = key.removeprefix("fsdp_")
        config[_ALIASES.get(plain, plain)] = value
    for word in _words(args.fsdp):
        if word == "offload":
            config.setdefault("cpu_offload", True)
        elif word in _STRATEGIES:
            config.setdefault("sharding_strategy", word)
        elif word != "auto_wrap":
            allowed = ", ".join((*_STRATEGIES, "offload", "auto_wrap"))
            raise ArgumentError(f"fsdp has the unknown word {word!r}; allowed: {allowed}")
    for key, value in config.items():
        _refuse(key, value)
    return config


def wants_xla(args: Any) -> bool:
    """True if `fsdp_config` selects XLA's sharding instead."""
    return truth(configuration(args).get("xla", False), "fsdp_config['xla']")


def options(args: Any) -> dict[str, Any]:
    """Return the options of the fsdp driver. Raises `ArgumentError`."""
    config = configuration(args)
    found: dict[str, Any] = {**_strategy(config), **_units(config)}
    if truth(config.get("cpu_offload", False), "fsdp_config['cpu_offload']"):
        found["cpu_offload"] = True
    for key in ("cpu_ram_efficient_loading", "sync_module_states"):
        if truth(config.get(key, False), f"fsdp_config[{key!r}]"):
            found["from_rank_0"] = True
    return found


def checkpointed(args: Any, model: nn.Module | None) -> tuple[str, ...]:
    """Return the classes of the layers whose activations `fsdp_config` recomputes.

    If it names no layers, these are the classes that `model` must not split; none before the model
    exists. Raises `ArgumentError`.
    """
    config = configuration(args) if args.fsdp else {}
    key = "xla_fsdp_grad_ckpt" if config.get("xla") else "activation_checkpointing"
    if not truth(config.get(key, False), f"fsdp_config[{key!r}]"):
        return ()
    if getattr(args, "gradient_checkpointing", False):
        raise ArgumentError(
            f"fsdp_config[{key!r}] and gradient_checkpointing are both True; activations would be "
            "recomputed twice: keep the former"
        )
    layers = _layers(config) or tuple(getattr(model, "_no_split_modules", None) or ())
    if model is not None and not layers:
        raise ArgumentError(
            f"fsdp_config[{key!r}] is True, and {type(model).__name__} does not say what its "
            "layers are; name their class in fsdp_config['transformer_layer_cls_to_wrap']"
        )
    return layers


class FsdpFacts:
    """FSDP's settings for other libraries, which read `state.fsdp_plugin` of the accelerator to
    shard their own model in the same way.
    """

    fsdp_version = 2
    state_dict_type = "FULL_STATE_DICT"
    ignored_modules = mixed_precision_policy = None
    """None: every parameter is sharded in its own precision, and autocast sets the precision of
    computation."""

    def __init__(self, options: dict[str, Any]) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy  # slow to import

        self.cpu_offload = CPUOffloadPolicy() if options.get("cpu_offload") else OffloadPolicy()
        self.cpu_ram_efficient_loading = options.get("from_rank_0", False)
        self.reshard_after_forward = options.get("reshard_after_forward", True)
        self.transformer_cls_names_to_wrap = list(options.get("wrap", ()))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"state.fsdp_plugin has no {name!r}: the fsdp driver shards the model by "
            "backend_options"
        )


def notes(args: Any) -> Iterator[str]:
    """Yield settings without effect, each with the reason."""
    for key, value in configuration(args).items():
        if key in _BUILT_IN:
            fulfilled, fact = _BUILT_IN[key]
            if str(value).lower() not in fulfilled:
                yield f"fsdp_config[{key!r}]={value!r} has no effect: {fact}"


def _words(fsdp: Any) -> list[str]:
    if isinstance(fsdp, bool) or fsdp is None:
        return []
    words = fsdp.split() if isinstance(fsdp, str) else fsdp
    plain = [str(getattr(word, "value", word)).lower() for word in words]
    return [word for word in plain if word not in ("true", "false")]


def _refuse(key: str, value: Any) -> None:
    known = (*_MAPPED, *_BUILT_IN, *_REFUSED)
    if key not in known:
        near = difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
        raise ArgumentError(f"fsdp_config has the unknown key {key!r}; {hint}")
    if key in _REFUSED and value not in _NOTHING:
        raise ArgumentError(f"fsdp_config[{key!r}]={value!r} is refused: {_REFUSED[key]}")
    if key == "state_dict_type" and "LOCAL" in str(value).upper():
        raise ArgumentError(
            f"fsdp_config['state_dict_type'] is {value!r}, which only the same number of processes "
            "could read; allowed: FULL_STATE_DICT, SHARDED_STATE_DICT"
        )


def _strategy(config: dict[str, Any]) -> dict[str, Any]:
    """Return the options for resharding after the forward, and for the number of ranks to shard
    over."""
    asked = {
        key: config[key] for key in ("sharding_strategy", "reshard_after_forward") if key in config
    }
    word = str(asked.get("sharding_strategy", "")).lower()
    again = asked.get("reshard_after_forward")
    if str(again).lower() in _STRATEGIES:  # the first version's meaning of that key
        word, again = str(again).lower(), None
    if word.isdigit() and 0 < int(word) <= len(_STRATEGIES):
        word = _STRATEGIES[int(word) - 1]
    if word and word not in _STRATEGIES:
        allowed = ", ".join(_STRATEGIES)
        raise ArgumentError(f"the FSDP sharding strategy is {word!r}; allowed: {allowed}")
    if word == "no_shard":
        raise ArgumentError("the FSDP strategy no_shard shards nothing: use backend='ddp'")
    found: dict[str, Any] = {}
    if word:
        found["reshard_after_forward"] = word not in ("shard_grad_op", "hybrid_shard_zero2")
    if again is not None:
        found["reshard_after_forward"] = truth(again, "fsdp_config['reshard_after_forward']")
    if word.startswith("hybrid"):
        found["shard_size"] = launched().local_size
    return found


def _units(config: dict[str, Any]) -> dict[str, Any]:
    """Return the options that divide the model into units."""
    policy = str(config.get("auto_wrap_policy") or "TRANSFORMER_BASED_WRAP").upper()
    layers, size = _layers(config), int(config.get("min_num_params") or 0)
    if layers and size:
        raise ArgumentError(
            f"fsdp_config divides the model by class ({', '.join(layers)}) and by size "
            f"(min_num_params={size}); give one of them"
        )
    if policy == "NO_WRAP":
        return {"min_unit_params": 2**62}  # only the root has this class
    if policy not in ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP"):
        raise ArgumentError(
            f"fsdp_config['auto_wrap_policy'] is {policy!r}; allowed: TRANSFORMER_BASED_WRAP, "
            "SIZE_BASED_WRAP, NO_WRAP"
        )
    if size:
        return {"min_unit_params": size}
    return {"wrap": layers} if layers else {}


def _layers(config: dict[str, Any]) -> tuple[str, ...]:
    names = config.get("transformer_layer_cls_to_wrap") or ()
    names = names.split(",") if isinstance(names, str) else names
    return tuple(name.strip() for name in names if name.strip())
