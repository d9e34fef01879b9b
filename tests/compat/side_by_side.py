"""One model and its data, given to drivetrain's Trainer and to transformers' in its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from drivetrain import compat

LIBRARIES: dict[str, Any] = {"ours": compat, "theirs": transformers}
TIMES = ("runtime", "per_second", "flos")
"""Parts of the keys whose figures are not compared."""


class Net(nn.Module):
    """Two features to three classes, with dropout where it is asked for."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(2, 4), nn.Linear(4, 3)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.dropout(self.hidden(x.to(self.hidden.weight.dtype)).tanh()))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def net(dropout: float = 0.0) -> Net:
    torch.manual_seed(1)
    return Net(dropout)


def llama() -> transformers.LlamaForCausalLM:
    """A language model that divides its loss by the count that it is given."""
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
    )
    return transformers.LlamaForCausalLM(config)


def points(count: int = 14) -> list[dict[str, Any]]:
    dice = torch.Generator().manual_seed(3)
    return [
        {"x": torch.randn(2, generator=dice), "labels": int(torch.randint(3, (), generator=dice))}
        for _ in range(count)
    ]


def sentences(count: int = 14) -> list[dict[str, Any]]:
    """Eight tokens each, of which more and more are not to be learned."""
    dice = torch.Generator().manual_seed(3)
    made = []
    for number in range(count):
        ids = torch.randint(16, (8,), generator=dice)
        labels = ids.clone()
        labels[: number % 5] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


def arguments(library: Any, folder: Path, **changes: Any) -> Any:
    given = {
        "per_device_train_batch_size": 2,
        "save_strategy": "no",
        "learning_rate": 0.05,
        "logging_steps": 1,
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": "none",
        **changes,
    }
    return library.TrainingArguments(output_dir=str(folder), **given)


def assert_same_history(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    """Equal keys in each log, and equal figures but for times."""
    assert [sorted(log) for log in ours] == [sorted(log) for log in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        for key, value in other.items():
            if not any(part in key for part in TIMES):
                assert mine[key] == pytest.approx(value, rel=2e-5, nan_ok=True), key


def assert_same_weights(ours: nn.Module, theirs: nn.Module) -> None:
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other)
