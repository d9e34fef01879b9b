"""Batches and models, moved to a device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...data.nested import can_be_moved, map_leaves

__all__ = ["generates_in_step", "move", "move_model"]


def move(data: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Move a batch to `device`, and cast floating and complex tensors to `dtype`, unless it is
    None. Other movable objects, such as graphs, are moved by their own `to`."""

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf.to(device) if can_be_moved(leaf) else leaf
        if dtype is None:
            return leaf if leaf.device == device else leaf.to(device)
        floating = leaf.is_floating_point() or leaf.is_complex()
        return leaf.to(device=device, dtype=dtype if floating else None)

    return map_leaves(moved, data)


def move_model(model: nn.Module, device: torch.device) -> None:
    """Move a model in place. Weights that several layers share stay shared; on XLA, `to` alone
    would give each layer a parameter of its own.
    """
    users: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        users.setdefault(id(parameter), []).append(name)
    model.to(device)
    for first, *others in users.values():
        shared = model.get_parameter(first)
        for name in others:
            layer, _, last = name.rpartition(".")
            if model.get_parameter(name) is not shared:
                setattr(model.get_submodule(layer), last, shared)


def generates_in_step(model: nn.Module) -> None:
    """Have transformers' `generate` call the model until all ranks are done, since a forward
    gathers weights from all ranks, and never skip a layer on one rank alone.
    """
    for module in model.modules():
        module._is_fsdp_managed_module = True  # type: ignore[assignment]  # its own mark
