"""Sequences of similar length come together, so that little is padding. The order is still drawn by
the seed, and resumes."""

from dataclasses import replace

import torch
from base import settings
from torch import nn

from drivetrain import DataSettings, Recipe, fit

data = [torch.ones(index * 7 % 40 + 1) for index in range(300)]
padded = []


def collate(samples):
    batch = nn.utils.rnn.pad_sequence(samples, batch_first=True)
    padded.append(float((batch == 0).float().mean()))
    return batch


def loss(module, batch):
    return module(batch.unsqueeze(-1)).square().sum()


recipe = Recipe(
    model=lambda: nn.Linear(1, 1),
    loss=loss,
    train_data=data,
    lengths=[len(sample) for sample in data],
    collate=collate,
)
shares = {}
for name, by_length in (("shuffled", None), ("by length", 10)):
    padded.clear()
    fit(recipe, replace(settings, data=DataSettings(by_length=by_length)), backend="cpu")
    shares[name] = sum(padded) / len(padded)
print({name: f"{share:.0%} padding" for name, share in shares.items()})
