"""Files of models and schedules: written, read back, or refused."""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.optim import lr_scheduler

from drivetrain.checkpoint.format import strict_json
from drivetrain.compat.checkpoints.model_files import (
    files_beside,
    has_weights,
    load_weights,
    read_weights,
    unsound,
    write_weights,
)
from drivetrain.compat.checkpoints.overlay_reader import OverlayReader
from drivetrain.compat.common.json_state import from_plain, to_plain
from drivetrain.kernel.errors import CheckpointError, CheckpointMismatch
from drivetrain.kernel.shards import Box, Flat


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("seen", torch.arange(2))


@pytest.mark.row("K5", status="differs", note="shared tensors are written once, where HF's fail")
@pytest.mark.row("K6")
def test_a_plain_module_with_shared_weights(tmp_path: Path) -> None:
    model = Tied()
    write_weights(tmp_path, model.state_dict())
    theirs = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert sorted(theirs) == ["first.bias", "first.weight", "second.bias", "seen"]
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    other = Tied()
    result = load_weights(other, read_weights(tmp_path))
    assert not result.missing_keys and not result.unexpected_keys
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )
    assert other.second.weight is other.first.weight


@pytest.mark.row("K21")
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_shards_with_an_index(tmp_path: Path, kind: str) -> None:
    weights = {"a": torch.randn(2, 3), "b": torch.randn(4)}
    stem = "model" if kind == "safetensors" else "pytorch_model"
    parts = {name: f"{stem}-{i:05d}-of-00002.{kind}" for i, name in enumerate(weights, 1)}
    for name, part in parts.items():
        one = {name: weights[name]}
        if kind == "bin":
            torch.save(one, tmp_path / part)
        else:
            safetensors.torch.save_file(one, tmp_path / part)
    index = tmp_path / f"{stem}.{kind}.index.json"
    index.write_text(json.dumps({"weight_map": parts}))
    assert has_weights(tmp_path) and unsound(tmp_path) is None
    found = read_weights(tmp_path)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    (tmp_path / parts["b"]).unlink()
    assert parts["b"] in str(unsound(tmp_path))
    index.write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    with pytest.raises(CheckpointError, match="not beside it"):
        read_weights(tmp_path)


def schedules() -> list[Any]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.5)
    return [
        lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
        lr_scheduler.MultiStepLR(optimizer, [2, 2, 5]),
        lr_scheduler.ReduceLROnPlateau(optimizer),
        lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=9),
        lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.ConstantLR(optimizer), lr_scheduler.CosineAnnealingLR(optimizer, 9)],
            milestones=[2],
        ),
    ]


def test_schedules_of_torch_survive_json() -> None:
    for schedule in schedules():
        state = schedule.state_dict()
        written = strict_json.dump(to_plain(state, "scheduler"))
        back = from_plain(strict_json.parse(written, "manifest"))
        assert to_plain(back, "again") == to_plain(state, "scheduler")
        schedule.load_state_dict(back)


def test_what_json_lacks() -> None:
    odd = {"worst": math.inf, "at": Counter({3: 2}), "rate": torch.tensor(0.5), "pair": (1, None)}
    back = from_plain(strict_json.parse(strict_json.dump(to_plain(odd, "odd")), "manifest"))
    assert back == {"worst": math.inf, "at": {3: 2}, "rate": 0.5, "pair": [1, None]}
    assert from_plain({"worst": {"<number>": "inf"}}) == {"worst": math.inf}  # as once written
    with pytest.raises(TypeError, match=r"odd\.inner\[1\] is a object"):
        to_plain({"inner": [0, object()]}, "odd")


def test_a_reader_of_tensors_at_hand() -> None:
    weight = torch.arange(12.0).view(3, 4)
    reader = OverlayReader(None, {"w": weight}, {"w/m": weight * 2})
    assert list(reader.names("weights")) == ["w"] and list(reader.names("state")) == []
    assert reader.info("optimizer", "w/m").shape == (3, 4)
    box = Box((1, 2), (2, 2))
    assert torch.equal(reader.read("weights", "w", box), weight[1:3, 2:4])
    assert torch.equal(reader.read("optimizer", "w/m", Flat(3, 7)), torch.arange(3.0, 7) * 2)
    with pytest.raises(CheckpointMismatch, match="'v'"):
        reader.read("weights", "v")


def test_missing_weights_are_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(CheckpointError, match="has none of"):
        read_weights(tmp_path)


class Pretrained:
    """A model that writes as transformers' models do: over existing files."""

    def __init__(self, value: str, shards: int) -> None:
        self.value, self.shards = value, shards

    def save_pretrained(self, folder: Path, dies: bool = False) -> None:
        (folder / "config.json").write_text(self.value)
        if dies:
            (folder / "model.safetensors").write_text("half")
            raise KeyboardInterrupt
        for shard in range(self.shards):
            name = f"model-{shard + 1:05}-of-{self.shards:05}.safetensors"
            (folder / name).write_text(self.value)
        (folder / "model.safetensors.index.json").write_text(self.value)


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_a_writer_that_dies_leaves_what_was_there(tmp_path: Path) -> None:
    with files_beside(tmp_path) as beside:
        Pretrained("old", 3).save_pretrained(beside)
    before = contents(tmp_path)
    assert len(before) == 5
    with pytest.raises(KeyboardInterrupt), files_beside(tmp_path) as beside:
        Pretrained("new", 2).save_pretrained(beside, dies=True)
    assert contents(tmp_path) == before


def test_shards_of_an_earlier_model_go_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for value, shards in (("old", 3), ("new", 2)):
        with files_beside(tmp_path) as beside:
            Pretrained(value, shards).save_pretrained(beside)
    found = contents(tmp_path)
    assert found.pop("notes.txt") == "mine"
    assert set(found.values()) == {"new"} and len(found) == 4


def test_a_model_is_saved_over_another_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import BertConfig, BertModel

    from drivetrain.compat import Trainer, TrainingArguments

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = BertModel(BertConfig(vocab_size=11, intermediate_size=8, **sizes))
    args = TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    trainer = Trainer(model=model, args=args)
    trainer.save_model()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert {"model.safetensors", "config.json"} <= before.keys()

    def torn(self: Any, folder: str, **_: Any) -> None:
        Path(folder, "config.json").write_text("{")
        Path(folder, "model.safetensors").write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(type(model), "save_pretrained", torn)
    with pytest.raises(OSError, match="No space left"):
        trainer.save_model()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
