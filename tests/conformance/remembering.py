"""A model whose layers keep state outside of parameters and buffers."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Remembering"]


class Summing(nn.Module):
    """Keeps the sum of all values that this rank has seen, in a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.total = self.total.to(x.device) + x.detach().float().sum()
        return x

    def get_extra_state(self) -> Tensor:
        return self.total

    def set_extra_state(self, state: Tensor) -> None:
        self.total = state.clone()


class Counting(nn.Module):
    """Counts its forwards, and scales by the count. Its state has values of each type."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.last = 0, torch.zeros(1, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
            self.last = self.last + 0.5
        return x / (1.0 + 0.1 * self.count)

    def get_extra_state(self) -> dict[str, Any]:
        return {
            "count": self.count,
            "note": f"{self.count} forwards",
            "raw": bytes([self.count % 256]) * 3,
            "file": io.BytesIO(b"as older modules have it"),
            "last": {1: self.last, 0.5: None},
            "nested": [True, float("inf"), ("a", [torch.full((), self.count)])],
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.count, self.last = state["count"], state["last"][1]
        assert state["note"] == f"{self.count} forwards"
        assert state["raw"] == bytes([self.count % 256]) * 3
        assert state["file"].read() == b"as older modules have it"
        assert state["nested"][:2] == [True, float("inf")]
        assert int(state["nested"][2][1][0]) == self.count


class Hooked(nn.Module):
    """Adds a tensor to its `state_dict` by a hook, and takes it back by another."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = torch.zeros(())
        hooked: Any = self
        hooked.register_state_dict_post_hook(self._add)
        hooked.register_load_state_dict_pre_hook(self._take)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.sums = self.sums.to(x.device) + 0.25
            x = x + 0.01 * self.sums
        return x

    @staticmethod
    def _add(module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
        state[f"{prefix}sums"] = module.sums

    @staticmethod
    def _take(module: Any, state: dict[str, Any], prefix: str, *args: Any) -> None:
        if f"{prefix}sums" in state:
            module.sums = state.pop(f"{prefix}sums").clone()


class Remembering(nn.Module):
    """Regression, in blocks that a pipeline can place on several ranks."""

    def __init__(self) -> None:
        super().__init__()
        kept = Summing(), Counting(), Hooked()
        sizes = (6, 16), (16, 16), (16, 3)
        self.body = nn.Sequential(
            *(nn.Sequential(k, nn.Linear(*s)) for k, s in zip(kept, sizes, strict=True))
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return y
