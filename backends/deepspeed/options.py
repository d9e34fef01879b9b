"""The options of the driver `deepspeed`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from ...data.ranges import Range

__all__ = ["DeepspeedOptions"]


@dataclass(frozen=True)
class DeepspeedOptions:
    """The driver's own arguments; all others of DeepSpeed go into `config`."""

    stage: Annotated[int, Range(1, most=3)] | None = None
    """1 shards the optimizer's state, 2 gradients too, 3 weights too; 2 by default."""
    config: Any = None
    """DeepSpeed's JSON: its path, or a dict. `auto` is filled in; what contradicts the plan is
    refused. `"bf16": {"enabled": "auto"}` holds the module's weights in 16 bits; without it
    torch.autocast computes in them. An `optimizer` section replaces the recipe's optimizer."""
    construct: Literal["sharded", "whole"] = "sharded"
    """At stage 3: shard each submodule when it is made, or the whole model when all is made (each
    rank needs host memory for all of it then, and the model may come from outside the recipe)."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """`cuda` or `cpu`; `auto` takes CUDA where there is a device for every local rank."""
