"""Nothing waits for the device between two steps that log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from trainer.problems import recipe

from drivetrain import EvaluateSettings, Settings
from drivetrain.backends.common import stepping
from drivetrain.kernel.events import Event, Logged, StepEnded
from drivetrain.trainer.fit import fit

WAITING = {"aten._local_scalar_dense.default", "aten.nonzero.default", "aten.is_nonzero.default"}


class CountWaits(TorchDispatchMode):
    """A dispatch mode that counts the operations that copy a device's value to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.waits += str(func) in WAITING
        return func(*args, **(kwargs or {}))


def answer_later(flag: Tensor) -> Callable[[], bool]:
    return lambda: True  # stands for the copy behind the queue, which needs an accelerator


def test_only_logging_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_device(*arguments: Any) -> Any:
        return stepping._step_on_device(*arguments)

    # the host's tensors take the path that an accelerator's take
    monkeypatch.setattr(stepping, "step_if_finite", on_device)
    monkeypatch.setattr(stepping, "fetch_flag", answer_later)
    counter = CountWaits()
    waits: dict[int, int] = {}
    logged: list[int] = []

    def watch(event: Event) -> None:
        if isinstance(event, StepEnded):
            waits[event.step] = counter.waits
        if isinstance(event, Logged):
            logged.append(event.step)

    settings = Settings(
        steps=20,
        global_batch=8,
        micro_batch=3,
        log_every=5,
        evaluate=EvaluateSettings(at_end=False),
    )
    with counter:
        fit(recipe(1000, dropout=0.1), settings, backend="cpu", observers=[watch])
    grew = [step for step in range(2, 21) if waits[step] > waits[step - 1]]
    assert logged == [5, 10, 15, 20]
    assert grew == [6, 11, 16]  # the logs after steps 5, 10 and 15
    assert torch.is_grad_enabled()
