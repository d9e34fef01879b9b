"""Converts `parallelism_config`, accelerate's parallel sizes, to options of the drivers.

`tp_size` partitions layers. `cp_size` and `sp_size` partition sequences; accelerate distinguishes
them by the library that implements them. Here the driver mesh implements both, by one dimension.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import ArgumentError, ArgumentRefused
from .launcher import PARALLEL_SIZES, launched

__all__ = ["notes", "options", "wants_mesh"]

_OF_MESH = ("cp_size", "sp_size", "tp_size")
"""Sizes that only the driver `mesh` supports."""


def wants_mesh(asked: Any) -> bool:
    """True if layers or sequences shall be partitioned."""
    sizes = _sizes(asked)
    return any(sizes[name] > 1 for name in _OF_MESH)


def options(asked: Any, driver: str) -> dict[str, Any]:
    """Return the driver's options for the sizes asked for. Raises `ArgumentError` for sizes that do
    not fit, and `ArgumentRefused` for sizes that the driver does not support.
    """
    sizes = _sizes(asked)
    _check(sizes, driver)
    replicas, parts = sizes["dp_replicate_size"], sizes["dp_shard_size"]
    if driver == "mesh" and asked.parallelism_config is not None:
        context = sizes["cp_size"] * sizes["sp_size"]
        return {
            "replicate": replicas,
            "shard": parts,
            "context": context,
            "tensor": sizes["tp_size"],
        }
    if parts > 1 and driver != "fsdp":
        raise ArgumentRefused(
            f"parallelism_config.dp_shard_size={parts}", driver, "set fsdp=True to shard weights"
        )
    if replicas > 1 and parts == 1 and driver not in ("ddp", "xpu"):
        raise ArgumentRefused(
            f"parallelism_config.dp_replicate_size={replicas}",
            driver,
            "without dp_shard_size every process holds all weights, which is backend='ddp'",
        )
    return {} if parts == 1 else {"shard_size": parts}


def notes(asked: Any) -> Iterator[str]:
    """Yield one line for each setting of how accelerate would partition sequences, which has no
    effect."""
    for name, usual in _USUAL.items():
        handler, _, field = name.partition(".")
        given = getattr(getattr(asked.parallelism_config, handler, None), field, None)
        if given not in (None, usual):
            yield (
                f"parallelism_config.{name}={given!r} has no effect on mesh: ranks exchange heads, "
                "or gather keys and values, around scaled_dot_product_attention"
            )


_USUAL = {
    "cp_handler.cp_comm_strategy": "allgather",
    "sp_handler.sp_seq_length_is_variable": True,
    "sp_handler.sp_attn_implementation": "sdpa",
}
"""Settings of accelerate's own implementations, with their defaults."""


def _sizes(asked: Any) -> dict[str, int]:
    config = asked.parallelism_config
    return {name: getattr(config, name, None) or 1 for name in PARALLEL_SIZES}


def _check(sizes: Mapping[str, int], driver: str) -> None:
    above = {name: size for name, size in sizes.items() if size > 1}
    if {"cp_size", "sp_size"} <= above.keys():
        raise ArgumentError(
            f"parallelism_config has cp_size={sizes['cp_size']} and sp_size={sizes['sp_size']}, "
            "which are two names for how many ranks share a sequence: give one of them"
        )
    number = launched().size
    if above and math.prod(above.values()) != number:
        asked = " times ".join(f"{name}={size}" for name, size in above.items())
        raise ArgumentError(
            f"parallelism_config asks for {asked} processes, and there are {number}"
        )
    for name in _OF_MESH:
        if name in above and driver != "mesh":
            raise ArgumentRefused(
                f"parallelism_config.{name}={above[name]}",
                driver,
                "leave backend out, or set it to 'mesh'",
            )
