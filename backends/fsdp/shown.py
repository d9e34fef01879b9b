"""Shows an update: the shards that this rank holds (`ShowsUpdates`)."""

from __future__ import annotations

from typing import Any

import torch

from . import dtensor

__all__ = ["show_update"]


def show_update(engine: Any, observer: Any) -> None:
    """Show the update that begins to an observer. `engine`: an `FsdpEngine`."""
    named, parts = dict(engine.module.named_parameters()), engine.own_parts()
    observer.weights({name: parts.get(name, (torch.empty(0), ())) for name in named})
    grads = {name: p.grad for name, p in named.items() if p.grad is not None}
    observer.gradients({name: dtensor.own_part(grad) for name, grad in grads.items()})
