"""Statistics of the activations of named modules, on request."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..data.nested import tensors_of
from ..kernel.contract import Engine, World
from ..kernel.errors import SettingError
from .settings import Settings

__all__ = ["Activations"]

_NUM_SUMS = 5
"""Finite elements, their sum and sum of squares, zeros, and elements that are not finite."""


class Activations:
    """Measures what the modules of `stats.activations` return in the forwards of a step."""

    def __init__(self, settings: Settings, world: World) -> None:
        """Raises `SettingError` if the model is compiled."""
        self._patterns, self._world = settings.stats.activations, world
        if self._patterns and settings.compile:
            raise SettingError(
                "stats.activations is set with compile=true, and compiled layers show no "
                "activations: leave one of both out"
            )
        self._parts: dict[str, nn.Module] = {}
        self._watches = False
        self._handles: list[Any] = []
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}
        self._ended: Mapping[str, tuple[Tensor, Tensor]] = {}

    def choose_modules(self, engine: Engine) -> None:
        """Find the modules, in the user's own model. Called by all ranks before the first step.
        Raises `SettingError` for a pattern that matches none."""
        if not self._patterns:
            return
        with engine.full_params(()) as module:
            named = {name: part for name, part in module.named_modules() if name}
        for pattern in self._patterns:
            if not (found := fnmatch.filter(named, pattern)):
                raise SettingError(
                    f"stats.activations has {pattern!r}, which matches no module. There are "
                    f"{', '.join([*named][:10])}{' and others' if len(named) > 10 else ''}"
                )
            self._parts |= {name: named[name] for name in found}

    def watch(self, computes: bool) -> None:
        """Measure while a microbatch is computed. Other forwards are left out, such as those by
        which a driver checks itself between microbatches."""
        self._watches = computes
        if computes and not self._handles:
            for name, part in self._parts.items():
                self._handles.append(part.register_forward_hook(partial(self._see, name)))

    def end(self) -> None:
        """End the measurement of a step, whose numbers `take` returns."""
        self._watches = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._ended, self._sums = self._sums, {}

    @torch.no_grad()
    def _see(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if not self._watches:
            return
        for tensor in tensors_of(output):
            if not tensor.is_floating_point() or not tensor.numel():
                continue
            finite = torch.isfinite(tensor)
            values = tensor.detach().double().where(finite, 0.0)
            num_finite, zeros = finite.sum(), (tensor == 0).sum()
            squares, nonfinite = values.square().sum(), tensor.numel() - num_finite
            counted = (num_finite, values.sum(), squares, zeros, nonfinite)
            sums, largest = torch.stack([each.double() for each in counted]), values.abs().max()
            if name in self._sums:
                before, largest_before = self._sums[name]
                sums, largest = before + sums, torch.maximum(largest_before, largest)
            self._sums[name] = sums, largest

    def take(self) -> list[float]:
        """Return the numbers that ranks add up: the sums of each module, and its largest value in
        the place of this rank."""
        taken: list[float] = []
        for name in self._parts:
            sums, largest = [0.0] * _NUM_SUMS, [0.0] * self._world.size
            if name in self._ended:
                sums = self._ended[name][0].tolist()
                largest[self._world.rank] = float(self._ended[name][1])
            taken += [*sums, *largest]
        return taken

    def figures(self, added: Sequence[float]) -> Mapping[str, Mapping[str, float | None]]:
        """Return the statistics of each module from the numbers of all ranks."""
        width = _NUM_SUMS + self._world.size
        return {
            name: _figures(added[n * width : (n + 1) * width]) for n, name in enumerate(self._parts)
        }


def _figures(added: Sequence[float]) -> dict[str, float | None]:
    finite, total, squares, zeros, nonfinite, *largest = added
    size = finite + nonfinite
    mean = total / finite if finite else None
    return {
        "mean": mean,
        "std": None if mean is None else math.sqrt(max(0.0, squares / finite - mean**2)),
        "max_abs": max(largest) if finite else None,
        "zeros": zeros / size if size else None,
        "nonfinite": nonfinite / size if size else None,
    }
