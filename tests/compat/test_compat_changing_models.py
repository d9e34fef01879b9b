"""Models whose buffers change shape during training, or that have a loading method of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from side_by_side import both, losses
from torch import Tensor, nn

from drivetrain.kernel.errors import CheckpointMismatch

STEPS: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 8}


class Growing(nn.Module):
    """A model that keeps every sample that it has trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.register_buffer("seen", torch.empty(0, 4))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if self.training:
            self.seen = torch.cat([self.seen, x.detach()])
        logits = self.inner(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class LoadsItself(Growing):
    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        self.seen = torch.empty_like(state_dict["seen"])
        return super().load_state_dict(state_dict, *args, **kwargs)


class PartLoadsItself(nn.Module):
    """A model with a part that has a loading method of its own."""

    class Part(Growing):
        def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
            self.seen = torch.empty_like(state_dict[prefix + "seen"])
            super()._load_from_state_dict(state_dict, prefix, *args)

    def __init__(self) -> None:
        super().__init__()
        self.part = self.Part()

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return self.part(x, labels)


@pytest.mark.few(2)
@pytest.mark.row("K11", "K12")
@pytest.mark.parametrize("model", [LoadsItself, PartLoadsItself, Growing])
def test_a_model_that_changes_its_shape_is_resumed(tmp_path: Path, model: Any) -> None:
    """Resume in the second epoch, on each side from its own checkpoint. transformers cannot resume
    a model without a way to load of its own.
    """
    for side in both(tmp_path):
        if model is Growing and side.folder.name == "theirs":
            continue
        whole = side.trainer(model, **STEPS)
        whole.train()
        for begun in (2, 6):
            again = side.trainer(model, **STEPS)
            again.train(resume_from_checkpoint=str(side.folder / f"checkpoint-{begun}"))
            assert losses(again) == losses(whole)
            mine, other = again.model.state_dict(), whole.model.state_dict()
            assert all(torch.equal(mine[name], other[name]) for name in other)


@pytest.mark.row("K28")
@pytest.mark.parametrize("model", [LoadsItself, Growing])
def test_its_best_checkpoint_is_loaded(tmp_path: Path, model: Any) -> None:
    ours, _ = both(tmp_path)
    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    trainer = ours.trainer(model, **STEPS, **best, learning_rate=1e3)
    trainer.train()
    assert trainer.state.best_global_step < 8
    assert len(trainer.model.seen) == {2: 8, 4: 16, 6: 22}[trainer.state.best_global_step]


def test_another_model_is_refused_as_ever(tmp_path: Path) -> None:
    class Other(Growing):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.empty(0, 5))

        def forward(self, x: Tensor, labels: Tensor) -> Any:
            self.eval()
            return super().forward(x, labels)

    ours, _ = both(tmp_path)
    ours.trainer(Other, **STEPS).train()
    with pytest.raises(CheckpointMismatch, match="seen"):
        ours.trainer(Growing, **STEPS).train(resume_from_checkpoint=True)
