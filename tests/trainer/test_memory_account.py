"""The account of a run's memory: by part and by module, and in the message when it runs out."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from drivetrain import DataSettings, EvaluateSettings, Recipe, Settings, fit
from drivetrain.kernel.errors import OutOfMemory
from drivetrain.kernel.events import Warned
from drivetrain.run.records import record_of
from drivetrain.run.report import Outcome, render
from drivetrain.run.run_history import RunHistory
from drivetrain.run.shown_config import ShownConfig
from drivetrain.trainer.memory_account import MemoryCounted

ROWS = 16
WEIGHTS = 4 * (4 * 8 + 8 + 8 * 1 + 1)
SETTINGS = Settings(steps=3, global_batch=ROWS, log_every=1)


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def squared(module: nn.Module, batch: Tensor) -> Tensor:
    return module(batch).square().sum()


def run(
    settings: Settings = SETTINGS,
    model: Callable[[], nn.Module] = build,
    loss: Callable[[nn.Module, Tensor], Any] = squared,
    **changes: Any,
) -> list[Any]:
    """Return the events of a run."""
    events: list[Any] = []
    recipe = Recipe(model=model, loss=loss, train_data=torch.ones(64, 4).cumsum(0) / 64, **changes)
    fit(recipe, settings, backend="cpu", observers=[events.append], progress=False)
    return events


def counted(*args: Any, **changes: Any) -> MemoryCounted:
    """Return the only account of a run."""
    (found,) = (event for event in run(*args, **changes) if isinstance(event, MemoryCounted))
    return found


def changed(**changes: Any) -> Settings:
    return dataclasses.replace(SETTINGS, **changes)


def test_parts_of_a_small_network() -> None:
    """Adam keeps two moments and a count of steps for each of four parameters."""
    found = counted()
    assert found.parts == {
        "weights": WEIGHTS,
        "gradients": WEIGHTS,
        "optimizer": 2 * WEIGHTS + 4 * 4,
        "activations": ROWS * (4 + 8 + 1) * 4,
        "loader": ROWS * 4 * 4,
    }
    assert (found.step, found.rank, found.estimated) == (1, 0, ())


def test_activations_belong_to_the_module_that_keeps_them_first() -> None:
    """The second linear layer keeps what tanh has kept already."""
    expected = {"1": ROWS * 8 * 4, "0": ROWS * 4 * 4, "outside of modules": ROWS * 4}
    assert counted().modules == expected
    assert counted(changed(micro_batch=4)).modules == {k: v / 4 for k, v in expected.items()}
    # matrix products keep copies in 16 bits; those of the weights are not activations
    half = {"1": ROWS * 8 * 2, "0": ROWS * 4 * 2, "outside of modules": ROWS * 2}
    assert counted(changed(precision="bf16")).modules == half


class Recomputed(nn.Sequential):
    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = checkpoint(super().forward, inputs, use_reentrant=False)
        return output


def test_activations_that_are_recomputed_are_not_counted() -> None:
    found = counted(model=lambda: Recomputed(*build()))
    assert found.modules == {"Recomputed": ROWS * 4 * 4, "outside of modules": ROWS * 4}


def test_frozen_weights_and_buffers_have_parts_of_their_own() -> None:
    def model() -> nn.Module:
        made = build()
        made[0].requires_grad_(False)
        made.register_buffer("table", torch.zeros(100))
        return made

    trained = 4 * (8 + 1)
    parts = counted(model=model).parts
    assert (parts["weights"], parts["frozen"]) == (trained, WEIGHTS - trained)
    assert (parts["gradients"], parts["buffers"]) == (trained, 400)


@pytest.mark.slow
def test_workers_keep_batches_ready() -> None:
    """Each of two workers keeps two batches ready."""
    parts = counted(changed(data=DataSettings(workers=2))).parts
    assert parts["loader"] == 2 * 2 * ROWS * 4 * 4
    assert sys.platform != "linux" or parts["workers"] > 1 << 20


def test_layers_that_repeat_are_joined() -> None:
    layers = [layer for _ in range(20) for layer in (nn.Linear(4, 4), nn.Tanh())]
    model = nn.ModuleDict({"blocks": nn.Sequential(*layers)})

    def loss(module: Any, batch: Tensor) -> Tensor:
        return module["blocks"](batch).square().sum()

    found = counted(model=lambda: model, loss=loss)
    assert found.modules == {"blocks.*": 21 * ROWS * 4 * 4}


def losses(events: list[Any]) -> list[float]:
    return [event.loss for event in events if hasattr(event, "grad_norm")]


def func(module: nn.Module, batch: Tensor) -> Tensor:
    """Use functions that refuse hooks on saved tensors."""
    weights = dict(module.named_parameters())

    def of_row(row: Tensor) -> Tensor:
        output: Tensor = torch.func.functional_call(module, weights, (row,))
        return output.square().sum()

    return torch.vmap(of_row)(batch).sum() + torch.vmap(torch.func.grad(of_row))(batch).sum()


def twice(module: nn.Module, batch: Tensor) -> Tensor:
    """Differentiate a gradient, as a gradient penalty does."""
    inputs = batch.clone().requires_grad_()
    (slope,) = torch.autograd.grad(module(inputs).sum(), inputs, create_graph=True)
    return slope.square().sum() + squared(module, batch)


@pytest.mark.parametrize("loss", [squared, func, twice])
def test_counting_changes_no_number(loss: Callable[[nn.Module, Tensor], Tensor]) -> None:
    settings = changed(evaluate=EvaluateSettings(sanity_check=False))  # which has no gradients
    events = run(settings, loss=loss)
    without = dataclasses.replace(settings, account_memory=False)
    assert losses(events) == losses(run(without, loss=loss))
    assert len(losses(events)) == 3


def test_counting_can_be_turned_off() -> None:
    events = run(changed(account_memory=False))
    assert not any(isinstance(event, MemoryCounted) for event in events)


def test_an_error_of_autograd_is_still_found_in_the_first_step() -> None:
    def in_place(module: nn.Module, batch: Tensor) -> Tensor:
        outputs = module(batch).exp()
        loss = outputs.sum()
        outputs.detach().zero_()
        return loss

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(loss=in_place)


def without_room(module: nn.Module, batch: Tensor) -> Tensor:
    if module.training and len(batch) > 4:
        module(batch)
        raise torch.OutOfMemoryError("no room")
    return squared(module, batch)


def test_the_largest_parts_are_in_the_message_of_the_first_step() -> None:
    """No update has made the optimizer's state yet, so it is estimated."""
    with pytest.raises(OutOfMemory) as raised:
        run(changed(out_of_memory="stop"), loss=without_room)
    message = str(raised.value)
    assert "The largest parts of memory, and what shrinks them: activations 768 B (of 1 512 B)" in (
        message
    )
    assert ": micro_batch=8, activation_checkpointing, precision=bf16 | optimizer state" in message
    assert f"optimizer state {2 * WEIGHTS} B (estimated): several ranks" in message
    assert f"gradients {WEIGHTS} B (estimated): several ranks" in message


def test_the_largest_parts_are_in_the_message_of_a_later_step() -> None:
    seen = 0

    def later(module: nn.Module, batch: Tensor) -> Tensor:
        nonlocal seen
        seen += module.training
        return squared(module, batch) if seen < 2 else without_room(module, batch)

    words = [event.message for event in run(loss=later) if isinstance(event, Warned)]
    assert "out of memory in step 2 with micro_batch=16 (no room): continuing" in words[0]
    assert "activations 832 B" in words[0]
    assert f"optimizer state {2 * WEIGHTS + 16} B: several ranks" in words[0]


def test_a_model_that_does_not_fit_is_estimated() -> None:
    class TooLarge(nn.Sequential):
        def to(self, *args: Any, **kwargs: Any) -> Any:
            raise torch.OutOfMemoryError("no room")

    with pytest.raises(OutOfMemory, match=rf"no memory for the model.* {WEIGHTS} B"):
        run(model=lambda: TooLarge(*build()))


def test_the_report_shows_parts_and_modules() -> None:
    record = json.loads(json.dumps(record_of(counted())))
    page = render(RunHistory.of([record]), ShownConfig(), Outcome("finished"))
    assert "Where the memory goes" in page
    for text in ("optimizer state", "activations", "408 B", "832 B", "512 B", "micro_batch=8"):
        assert text in page


def test_snapshots_of_an_allocator_are_json(tmp_path: Path, monkeypatch: Any) -> None:
    """The host has no such allocator: a device's is simulated."""
    memory = SimpleNamespace(_snapshot=lambda: {"segments": [{"address": 1, "blocks": ()}]})
    module = SimpleNamespace(
        __name__="torch.cpu",
        memory=memory,
        max_memory_allocated=lambda device: 123,
        memory_allocated=lambda device: 12,
        is_available=lambda: False,
    )
    monkeypatch.setitem(sys.modules, "torch.cpu.memory", memory)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    recipe = Recipe(model=build, loss=without_room, train_data=torch.ones(64, 4))
    settings = changed(out_of_memory="stop", steps=1, micro_batch=4)
    fit(recipe, settings, backend="cpu", out=tmp_path / "fits", progress=False)
    with pytest.raises(OutOfMemory):
        fit(
            recipe,
            changed(out_of_memory="stop"),
            backend="cpu",
            out=tmp_path / "fails",
            progress=False,
        )
    for name in ("fits/memory-step-1.json", "fails/memory-rank-0.json"):
        assert json.loads((tmp_path / name).read_text())["segments"][0]["address"] == 1
