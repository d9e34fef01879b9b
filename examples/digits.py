"""Image classification: the handwritten digits that scikit-learn carries (8 x 8 pixels, 1797).

::

    drivetrain train examples/digits.py --set backend.threads=1

Reaches about 99 % on digits that it never trained on, in seconds. `measure` returns sums and
`summarise` makes metrics of them, so that they are exact for any batch size and world size.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from drivetrain import (
    CheckpointSettings,
    EvaluateSettings,
    OptimizerSettings,
    Recipe,
    ScheduleSettings,
    Settings,
)

Batch = list[Tensor]
"""Images (B, 1, 8, 8) and labels (B)."""

settings = Settings(
    epochs=10,
    global_batch=64,
    optimizer=OptimizerSettings(lr=6e-3, weight_decay=0.05),
    schedule=ScheduleSettings(name="cosine", warmup=10, final=0.0),
    evaluate=EvaluateSettings(every=100, micro_batch=512),
    # `loss` is the default; the best checkpoint is the one that is right most often
    checkpoint=CheckpointSettings(best_metric="accuracy", best_mode="max"),
)


def model() -> nn.Module:
    """Two convolutions and a linear layer, 29 thousand parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 10),
    )


def loss(module: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy, summed over the batch: the kernel divides."""
    images, labels = batch
    return F.cross_entropy(module(images).float(), labels, reduction="sum")


def measure(module: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
    """Sums over the batch."""
    images, labels = batch
    logits = module(images).float()
    return {
        "loss": F.cross_entropy(logits, labels, reduction="sum"),
        "right": (logits.argmax(-1) == labels).sum(),
    }


def summarise(sums: Mapping[str, Tensor]) -> Mapping[str, float]:
    """Metrics of the sums over the whole data set; the kernel adds `items` and `samples`."""
    return {
        "loss": float(sums["loss"] / sums["items"]),
        "accuracy": float(sums["right"] / sums["samples"]),
    }


def recipe() -> Recipe:
    """Every fifth digit is held out."""
    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(bunch.target)
    held_out = torch.arange(len(labels)) % 5 == 4
    return Recipe(
        model=model,
        loss=loss,
        train_data=TensorDataset(images[~held_out], labels[~held_out]),
        eval_data={"held_out": TensorDataset(images[held_out], labels[held_out])},
        measure=measure,
        summarise=summarise,
    )
