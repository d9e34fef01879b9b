"""A whole training, which the other files in this folder change in one place.

::

    python examples/by_feature/base.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain import OptimizerSettings, Recipe, Settings, fit

generator = torch.Generator().manual_seed(0)
inputs = torch.randn(400, 8, generator=generator)
labels = (inputs[:, :2].sum(1) > inputs[:, 2].abs() - 0.7).long()
train_data = TensorDataset(inputs[:300], labels[:300])
held_out = TensorDataset(inputs[300:], labels[300:])


def model():
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))


def loss(module, batch):
    """The sum over the batch: the kernel divides by the samples of the global batch."""
    return F.cross_entropy(module(batch[0]), batch[1], reduction="sum")


recipe = Recipe(model=model, loss=loss, train_data=train_data, eval_data={"held_out": held_out})
settings = Settings(epochs=4, global_batch=30, optimizer=OptimizerSettings(lr=1e-2))

if __name__ == "__main__":
    result = fit(recipe, settings, backend="cpu")
    print(f"step {result.step}: {result.metrics}")
