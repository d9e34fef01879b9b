"""Tabular data: how far a patient's diabetes went in a year, from ten measurements (442 patients,
carried by scikit-learn).

::

    drivetrain train examples/tasks/tables.py

`r2` is the share of the variance that is explained: about 0.45, as linear regression does; 0 is
always saying the mean.
"""

import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain import OptimizerSettings, Recipe, Settings

settings = Settings(
    epochs=40, global_batch=32, optimizer=OptimizerSettings(lr=3e-3, weight_decay=0.05)
)


def model():
    return nn.Sequential(nn.Linear(10, 32), nn.SiLU(), nn.Dropout(0.1), nn.Linear(32, 1))


def loss(module, batch):
    return (module(batch[0]) - batch[1]).square().sum()


def measure(module, batch):
    """Sum the squared errors, and the targets and their squares, from which `summarise` computes
    the variance without another pass over the data.
    """
    return {
        "squares": loss(module, batch),
        "targets": batch[1].sum(),
        "targets_squared": batch[1].square().sum(),
    }


def summarise(sums):
    mean = sums["targets"] / sums["samples"]
    variance = sums["targets_squared"] / sums["samples"] - mean.square()
    error = sums["squares"] / sums["samples"]
    return {"loss": float(error), "r2": float(1 - error / variance)}


def standardised(table, training):
    """Standardise by the mean and deviation of the rows to train on."""
    return (table - table[training].mean(0)) / table[training].std(0)


def recipe():
    """Every fourth patient is held out."""
    measured, progress = load_diabetes(return_X_y=True)
    held_out = torch.arange(len(measured)) % 4 == 3
    inputs = standardised(torch.tensor(measured, dtype=torch.float32), ~held_out)
    targets = standardised(torch.tensor(progress, dtype=torch.float32).unsqueeze(1), ~held_out)
    return Recipe(
        model=model,
        loss=loss,
        train_data=TensorDataset(inputs[~held_out], targets[~held_out]),
        eval_data={"held_out": TensorDataset(inputs[held_out], targets[held_out])},
        measure=measure,
        summarise=summarise,
    )
