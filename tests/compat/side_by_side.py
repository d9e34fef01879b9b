"""One model and its data, for drivetrain's Trainer and for transformers'."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    import transformers


class Libraries(Mapping[str, Any]):
    """The modules of these names. Each is imported on access, so that drivetrain's runs without
    transformers.
    """

    def __init__(self, **modules: str) -> None:
        self.modules = modules

    def __getitem__(self, name: str) -> Any:
        return import_module(self.modules[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.modules)

    def __len__(self) -> int:
        return len(self.modules)


LIBRARIES = Libraries(ours="drivetrain.compat", theirs="transformers")


class Classifier(nn.Module):
    """A classifier of four features into three classes, in any precision, that does not depend on
    transformers.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner, self.drop, self.outer = nn.Linear(4, 8), nn.Dropout(dropout), nn.Linear(8, 3)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.outer(self.drop(self.inner(x.to(self.inner.weight.dtype)).tanh()))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def classifier(dropout: float = 0.0) -> Classifier:
    torch.manual_seed(1)
    return Classifier(dropout)


def samples(count: int = 14, labels: bool = True) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    made = [
        {"x": torch.randn(4, generator=draw), "labels": torch.randint(3, (), generator=draw)}
        for _ in range(count)
    ]
    return made if labels else [{"x": sample["x"]} for sample in made]


def accuracy(prediction: Any) -> dict[str, Any]:
    return {"accuracy": (prediction.predictions.argmax(-1) == prediction.label_ids).mean()}


def llama() -> transformers.LlamaForCausalLM:
    """Return a language model that divides its loss by the count that it receives."""
    import transformers

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


def sentences(count: int = 14) -> list[dict[str, Any]]:
    """Return sentences of eight tokens, of which more and more are ignored by the loss."""
    dice = torch.Generator().manual_seed(3)
    made = []
    for number in range(count):
        ids = torch.randint(16, (8,), generator=dice)
        labels = ids.clone()
        labels[: number % 5] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


QUIET: dict[str, Any] = {
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
    "logging_steps": 1,
    "save_strategy": "no",
}
ARGUMENTS: dict[str, Any] = {
    **QUIET,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "learning_rate": 1e-2,
}


def arguments(library: Any, folder: Path, **changes: Any) -> Any:
    """Return arguments with batches of two, and large steps."""
    given = {**QUIET, "per_device_train_batch_size": 2, "learning_rate": 0.05, **changes}
    return library.TrainingArguments(output_dir=str(folder), **given)


@dataclass(frozen=True)
class Side:
    """A library: its Trainer, its arguments, and a folder for its runs."""

    trainer_type: Any
    arguments_type: Any
    folder: Path

    @classmethod
    def of(cls, name: str, folder: Path) -> Side:
        library = LIBRARIES[name]
        return cls(library.Trainer, library.TrainingArguments, folder / name)

    def trainer(self, model: Callable[[], nn.Module] = Classifier, **keywords: Any) -> Any:
        """Return a Trainer whose model starts from the same weights in either library. Keywords
        that the Trainer knows are passed to it, the others to the arguments.
        """
        torch.manual_seed(1)
        own = {name: keywords.pop(name) for name in list(keywords) if name in _OWN}
        given = {"output_dir": str(self.folder), **ARGUMENTS, **keywords}
        own.setdefault("train_dataset", samples(22))
        own.setdefault("eval_dataset", samples(11))
        return self.trainer_type(model(), self.arguments_type(**given), **own)


_OWN = (
    "train_dataset",
    "eval_dataset",
    "compute_metrics",
    "preprocess_logits_for_metrics",
    "callbacks",
    "data_collator",
    "processing_class",
    "optimizers",
)


def ours(folder: Path) -> Side:
    return Side.of("ours", folder)


def both(folder: Path) -> tuple[Side, Side]:
    return ours(folder), Side.of("theirs", folder)


def losses(trainer: Any) -> list[float]:
    """Return the losses logged while training, to the last bit."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


TIMES = ("_runtime", "_per_second", "_preparation_time")
"""Ends of the keys whose values depend on a clock."""


def without_times(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in metrics.items() if not name.endswith(TIMES)}


def assert_same_history(
    ours: list[dict[str, Any]], theirs: list[dict[str, Any]], rel: float = 2e-5
) -> None:
    """Require equal keys in each log, and equal values but for times."""
    assert [sorted(log) for log in ours] == [sorted(log) for log in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        wanted = without_times(other)
        assert without_times(mine) == pytest.approx(wanted, rel=rel, nan_ok=True)


def assert_same_weights(ours: nn.Module, theirs: nn.Module) -> None:
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other)
