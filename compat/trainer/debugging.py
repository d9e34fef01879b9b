"""The argument `debug`: XLA's counters, and a stop at the first nan or infinity."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...data.nested import named_leaves

__all__ = ["OverflowWatch", "is_debugged", "print_xla_metrics"]


def is_debugged(args: Any, what: str) -> bool:
    """Whether `debug` has that word."""
    return what in [str(getattr(word, "value", word)) for word in args.debug or ()]


def print_xla_metrics(args: Any, session: Any) -> None:
    """With `tpu_metrics_debug`, on the first rank: how often XLA compiled, ran and copied, and for
    how long.
    """
    if session.driver.name != "xla" or not is_debugged(args, "tpu_metrics_debug"):
        return
    if args.process_index == 0:
        print(import_module("torch_xla.debug.metrics").metrics_report())


class OverflowWatch:
    """Looks at every module's weights, inputs and outputs in each forward.

    At the first value that is not finite it raises ValueError, whose text has the smallest and
    largest magnitude of everything that the last `num_frames` modules saw. Slow: each tensor is
    waited for. `remove` ends it.
    """

    def __init__(self, model: nn.Module, num_frames: int = 21) -> None:
        self.model = model
        self.frames: deque[str] = deque(maxlen=num_frames)
        self.num_forwards = 0
        self._names = {module: name or "the model" for name, module in model.named_modules()}
        self._hooks: list[RemovableHandle] = [
            module.register_forward_hook(self._look, with_kwargs=True) for module in self._names
        ]

    def remove(self) -> None:
        """Watch no longer."""
        for hook in self._hooks:
            hook.remove()

    def _look(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        seen: dict[str, Tensor] = dict(module.named_parameters(recurse=False))
        for name, value in (("input", args), ("input", kwargs), ("output", output)):
            seen.update(_tensors(value, name))
        wrong = [name for name, tensor in seen.items() if not torch.isfinite(tensor).all()]
        lines = [f"{self._names[module]} ({type(module).__name__})"]
        lines += [f"  {_range(tensor)}  {name}" for name, tensor in seen.items()]
        self.frames.append("\n".join(lines))
        if wrong:
            raise ValueError(
                f"nan or infinity in {', '.join(wrong)} of {self._names[module]}, in forward"
                f" {self.num_forwards} (debug='underflow_overflow'). Smallest and largest"
                " magnitudes of what came before, in the order of the calls:\n"
                + "\n".join(self.frames)
            )
        self.num_forwards += module is self.model


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """The floating tensors in nested containers, each with where it is."""
    for path, leaf in named_leaves(value):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel() > 0:
            yield name + "".join(f"[{key!r}]" for key in path), leaf


def _range(tensor: Tensor) -> str:
    low, high = tensor.detach().abs().aminmax()
    return f"{low:9.2e} {high:9.2e}"
