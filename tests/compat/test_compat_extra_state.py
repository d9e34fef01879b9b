"""Extra state of modules in checkpoints and model files: tensors as transformers' Trainer saves
them, and the rest in the run's own checkpoint.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from side_by_side import Classifier, assert_same_weights, both, llama, losses, ours, sentences
from torch import Tensor, nn

from drivetrain.kernel.errors import RecipeError

STEPS: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}


class Scaled(Classifier):
    """Divides by the largest value of the last batch, which it keeps in extra state."""

    kind = "tensor"

    def __init__(self) -> None:
        super().__init__()
        self.largest = torch.ones(1)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        scaled = x / self.largest
        if self.training:
            self.largest = x.detach().abs().max().view(1)
        return super().forward(scaled, labels)

    def get_extra_state(self) -> Any:
        if self.kind == "tensor":
            return self.largest
        if self.kind == "dict":
            return {"largest": self.largest.tolist(), "note": "of the last batch"}
        file = io.BytesIO()
        torch.save(self.largest, file)
        return file if self.kind == "bytes" else object()

    def set_extra_state(self, state: Any) -> None:
        if isinstance(state, io.BytesIO):
            state = torch.load(state, weights_only=True)
        self.largest = state if isinstance(state, Tensor) else torch.tensor(state["largest"])


def scaled(of_kind: str) -> type[Scaled]:
    class Chosen(Scaled):
        kind = of_kind

    return Chosen


@pytest.mark.parametrize("kind", ["tensor", "dict", "bytes"])
def test_extra_state_is_resumed(kind: str, tmp_path: Path, caplog: Any) -> None:
    side = ours(tmp_path)
    whole = side.trainer(scaled(kind), **STEPS)
    whole.train()
    again = side.trainer(scaled(kind), **STEPS)
    again.train(resume_from_checkpoint=str(side.folder / "checkpoint-2"))
    assert losses(again) == losses(whole)
    assert torch.equal(again.model.largest, whole.model.largest)
    assert_same_weights(again.model, whole.model)
    assert "extra state" not in caplog.text


def test_a_tensor_is_in_the_files_as_theirs(tmp_path: Path) -> None:
    trainers = [side.trainer(scaled("tensor"), **STEPS) for side in both(tmp_path)]
    for trainer in trainers:
        trainer.train()
    files = [Path(t.args.output_dir, "checkpoint-6", "model.safetensors") for t in trainers]
    mine, other = map(load_file, files)
    assert mine.keys() == other.keys()
    assert torch.equal(mine["_extra_state"], other["_extra_state"])


@pytest.mark.parametrize("kind", ["tensor", "dict"])
def test_the_best_model_has_its_extra_state(kind: str, tmp_path: Path, caplog: Any) -> None:
    seen: list[tuple[float, float]] = []
    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}

    def metrics(prediction: Any) -> dict[str, float]:
        seen.append((float(len(seen)), float(trainer.model.largest)))
        return {"rank": -float(len(seen))}

    chosen = {**best, "metric_for_best_model": "rank", "greater_is_better": True}
    trainer = ours(tmp_path).trainer(scaled(kind), **STEPS, **chosen, compute_metrics=metrics)
    trainer.train()
    assert float(trainer.model.largest) == seen[0][1]
    assert seen[0][1] != seen[-1][1]
    assert "lack extra state" not in caplog.text


@pytest.mark.parametrize("kind", ["tensor", "dict"])
def test_files_alone_hold_tensors_and_name_the_rest(kind: str, tmp_path: Path, caplog: Any) -> None:
    side = ours(tmp_path)
    trainer = side.trainer(scaled(kind), **STEPS, save_only_model=True)
    trainer.train()
    named = "lacks extra state of modules that is no tensor: _extra_state" in caplog.text
    assert named == (kind == "dict")
    other = side.trainer(scaled(kind))
    caplog.clear()
    other._load_from_checkpoint(str(side.folder / "checkpoint-6"))
    assert_same_weights(other.model, trainer.model)
    assert torch.equal(other.model.largest, trainer.model.largest) == (kind == "tensor")
    assert ("lack extra state of modules, which stays" in caplog.text) == (kind == "dict")


def test_files_with_state_that_the_model_lacks_are_loaded(tmp_path: Path, caplog: Any) -> None:
    side = ours(tmp_path)
    trainer = side.trainer(scaled("tensor"), **STEPS)
    trainer.train()
    other = side.trainer(Classifier, **STEPS)
    other.train(resume_from_checkpoint=str(side.folder / "checkpoint-4"))
    assert "extra state that only the checkpoint has: _extra_state" in caplog.text


def test_state_that_cannot_be_saved_is_refused_at_the_start(tmp_path: Path) -> None:
    side = ours(tmp_path)
    with pytest.raises(RecipeError, match="_extra_state is a object, which no checkpoint can hold"):
        side.trainer(scaled("object"), **STEPS).train()
    assert not list(side.folder.glob("checkpoint-*"))
    side.trainer(scaled("object"), max_steps=1).train()  # saves nothing


def test_a_buffer_that_is_not_persistent_is_named(tmp_path: Path, caplog: Any) -> None:
    class Counting(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()), persistent=False)

        def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            self.count += 1
            return super().forward(x, labels)

    ours(tmp_path).trainer(Counting, **STEPS).train()
    assert caplog.text.count("a forward has written to count, which no checkpoint holds") == 1


def test_a_pretrained_model_with_other_state_is_saved(tmp_path: Path) -> None:
    def model() -> nn.Module:
        made = llama()

        class Counts(type(made.model.norm)):  # type: ignore[misc]
            count = 0

            def forward(self, x: Tensor) -> Any:
                self.count += self.training
                return super().forward(x)

            def get_extra_state(self) -> dict[str, int]:
                return {"count": self.count}

            def set_extra_state(self, state: dict[str, int]) -> None:
                self.count = state["count"]

        made.model.norm.__class__ = Counts
        return made

    side = ours(tmp_path)
    data = {"train_dataset": sentences()}
    whole = side.trainer(model, **STEPS, **data)
    whole.train()
    again = side.trainer(model, **STEPS, **data)
    again.train(resume_from_checkpoint=str(side.folder / "checkpoint-4"))
    assert again.model.model.norm.count == whole.model.model.norm.count == 6
    assert losses(again) == losses(whole)
    again.save_model(str(tmp_path / "model"))
    assert (tmp_path / "model" / "model.safetensors").is_file()


class Precise(torch.optim.Optimizer):
    """Momentum in float32, whatever the dtype of the weights."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                last = self.state[parameter].get("momentum", torch.zeros_like(parameter).float())
                self.state[parameter]["momentum"] = 0.9 * last + parameter.grad.float()
                update = self.state[parameter]["momentum"].to(parameter.dtype)
                parameter.sub_(update, alpha=group["lr"])


@pytest.mark.parametrize("format_of_files", ["drivetrain", "hf"])
def test_state_of_an_optimizer_keeps_its_dtype(format_of_files: str, tmp_path: Path) -> None:
    side = ours(tmp_path)

    def trainer(**changes: Any) -> Any:
        model = Classifier().bfloat16()
        schedule = torch.optim.lr_scheduler.ConstantLR
        optimizer = Precise(model.parameters())
        pair = optimizer, schedule(optimizer, factor=1.0)
        given = {**STEPS, "checkpoint_format": format_of_files}
        return side.trainer(lambda: model, **given, optimizers=pair, **changes)

    torch.manual_seed(1)
    whole = trainer()
    whole.train()
    again = trainer()
    again.train(resume_from_checkpoint=str(side.folder / "checkpoint-2"))
    assert losses(again)[-4:] == losses(whole)[-4:]
    assert_same_weights(again.model, whole.model)
    states = [list(each.optimizer.state.values()) for each in (whole, again)]
    for mine, other in zip(*states, strict=True):
        assert other["momentum"].dtype == torch.float32
        assert torch.equal(mine["momentum"], other["momentum"])
