"""Finds the repeated blocks of a model."""

from __future__ import annotations

from collections import Counter

from torch import nn

__all__ = ["is_callable", "repeated_blocks"]


def repeated_blocks(part: nn.Module) -> list[nn.Module]:
    """Return the outermost children of one class in a list, if they are made of modules."""
    if isinstance(part, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        classes = Counter(type(child) for child in part.children())
        blocks = [
            child
            for child in part.children()
            if classes[type(child)] > 1 and is_callable(child) and [*child.children()]
        ]
        if blocks:
            return [block for block in blocks if any(True for _ in block.parameters())]
    return [unit for child in part.children() for unit in repeated_blocks(child)]


def is_callable(part: nn.Module) -> bool:
    """Return False for lists and dicts of modules, which are never called."""
    return type(part).forward is not nn.Module.forward
