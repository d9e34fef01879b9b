"""LoRA on plain modules: trained and frozen weights, and export of whole weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import drivetrain
from drivetrain import Recipe, Settings, lora
from drivetrain.checkpoint import CheckpointReader, export_weights
from drivetrain.kernel.errors import RecipeError
from drivetrain.trainer.fit import fit

from .problems import Pairs, everything, squared_error


def plain() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8, bias=False), nn.Linear(8, 1))


def adapted() -> nn.Module:
    model = lora(plain(), r"^[02]$", rank=2, alpha=6)
    model[3].requires_grad_()  # type: ignore[index, operator]
    return model


RECIPE = Recipe(adapted, squared_error, train_data=Pairs(40))
SETTINGS = Settings(steps=8, global_batch=5)
LEARNT = {"0.lora_a", "0.lora_b", "2.lora_a", "2.lora_b", "3.weight", "3.bias"}


def test_it_begins_as_the_model_was() -> None:
    inputs = torch.randn(9, 4)
    assert torch.equal(adapted()(inputs), plain()(inputs))
    learning = {name for name, p in adapted().named_parameters() if p.requires_grad}
    assert learning == LEARNT


@pytest.mark.parametrize("backend", ["cpu", "fsdp"])
def test_the_change_alone_learns_and_is_added_on_export(backend: str, tmp_path: Path) -> None:
    options = {"threads": 1} if backend == "cpu" else {}
    whole = fit(RECIPE, SETTINGS, backend=backend, backend_options=options, out=tmp_path / "a")
    half = dataclasses.replace(SETTINGS, steps=4)
    fit(RECIPE, half, backend=backend, backend_options=options, out=tmp_path / "b")
    assert whole.checkpoint is not None
    reader = CheckpointReader(whole.checkpoint)
    before = adapted().state_dict()
    for name, start in before.items():
        now = reader.read("weights", name)
        assert torch.equal(now, start) == (name not in LEARNT), name
    moments = {name.rpartition("/")[0] for name in reader.names("optimizer")}
    assert {name.rpartition("/")[0] or name for name in moments} <= LEARNT | {""}

    exported = load_file(export_weights(whole.checkpoint, tmp_path / "out") / "model.safetensors")
    model = plain()
    model.load_state_dict(exported)
    inputs, _ = torch.utils.data.default_collate(list(Pairs(40)))
    predicted = drivetrain.predict(
        RECIPE, Pairs(40), tmp_path / "a", forward=lambda m, batch: m(batch[0]), backend="cpu"
    )
    torch.testing.assert_close(model(inputs).detach(), predicted, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(predicted, plain()(inputs), atol=1e-2)


def test_it_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole = fit(RECIPE, SETTINGS, backend="cpu", out=tmp_path / "whole")
    half = dataclasses.replace(SETTINGS.checkpoint, every=4, keep_last=9)
    fit(RECIPE, dataclasses.replace(SETTINGS, checkpoint=half), backend="cpu", out=tmp_path / "a")
    middle = tmp_path / "a" / "checkpoints" / "checkpoint-000004"
    rest = fit(RECIPE, SETTINGS, backend="cpu", out=tmp_path / "b", resume=middle)
    one, other = everything(whole.checkpoint), everything(rest.checkpoint)
    assert not [name for name in one if not torch.equal(one[name], other[name])]


def test_a_model_that_is_one_layer() -> None:
    layer = nn.Linear(3, 3)
    changed: Any = lora(layer, "", rank=3)
    assert changed.weight is layer.weight and not changed.weight.requires_grad
    nn.init.ones_(changed.lora_b)
    change = changed.lora_b @ changed.lora_a
    inputs = torch.randn(2, 3)
    expected = inputs @ (layer.weight + change).T + layer.bias
    torch.testing.assert_close(changed(inputs), expected)


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))
    model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: lora(plain(), "attention"), ["Sequential", "'attention'", "0, 2, 3"]),
        (lambda: lora(nn.Tanh(), ""), ["Tanh", "none"]),
        (lambda: lora(plain(), "0", rank=5), ["rank is 5", "'0'", "from 1 to 4"]),
        (lambda: lora(plain(), "0", rank=0), ["rank is 0"]),
        (lambda: lora(tied(), "1"), ["'1'", "another layer's"]),
    ],
)
def test_what_cannot_be_adapted_is_named(make: Callable[[], Any], words: list[str]) -> None:
    with pytest.raises(RecipeError) as raised:
        make()
    assert all(word in str(raised.value) for word in words), raised.value
