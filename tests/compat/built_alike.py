"""Our Trainer and transformers', built alike: what tests of compat compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.compat.arguments import TrainingArguments
from drivetrain.compat.trainer.trainer import Trainer


class Classifier(nn.Module):
    """A model that knows nothing of transformers."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner, self.drop, self.outer = nn.Linear(4, 8), nn.Dropout(dropout), nn.Linear(8, 3)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        logits = self.outer(self.drop(torch.tanh(self.inner(x))))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def samples(count: int, labels: bool = True) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    made = [
        {"x": torch.randn(4, generator=draw), "labels": torch.randint(3, (), generator=draw)}
        for _ in range(count)
    ]
    return made if labels else [{"x": sample["x"]} for sample in made]


def accuracy(prediction: Any) -> dict[str, Any]:
    return {"accuracy": (prediction.predictions.argmax(-1) == prediction.label_ids).mean()}


ARGUMENTS: dict[str, Any] = {
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
}


@dataclass(frozen=True)
class Side:
    """A library: its Trainer, its arguments, and a folder for its runs."""

    trainer_type: Any
    arguments_type: Any
    folder: Path

    def trainer(self, model: Callable[[], nn.Module] = Classifier, **keywords: Any) -> Any:
        """A Trainer with a model that starts from the same weights on either side. Keywords that
        are the Trainer's own are given to it, the others to the arguments.
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
    """Ours alone; transformers is not imported."""
    return Side(Trainer, TrainingArguments, folder / "ours")


def both(folder: Path) -> tuple[Side, Side]:
    """Ours and theirs."""
    import transformers

    theirs = Side(transformers.Trainer, transformers.TrainingArguments, folder / "theirs")
    return ours(folder), theirs


def losses(trainer: Any) -> list[float]:
    """What was logged while training, to the last bit."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def without_times(metrics: dict[str, Any]) -> dict[str, Any]:
    """Metrics but for those that a clock decides."""
    clocks = ("_runtime", "_per_second", "_preparation_time")
    return {name: value for name, value in metrics.items() if not name.endswith(clocks)}
