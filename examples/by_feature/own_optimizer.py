"""An optimizer that the recipe builds, with a learning rate of its own for the last layer. It gets
the names and parameters of the model as the driver wraps them. `--set optimizer.name=...` takes any
by its dotted name, without code."""

from dataclasses import replace

import torch
from base import recipe, settings

from drivetrain import fit


def optimizer(named):
    named = list(named)
    last = [parameter for name, parameter in named if name.startswith("2.")]
    rest = [parameter for name, parameter in named if not name.startswith("2.")]
    groups = [{"params": rest}, {"params": last, "lr": 0.2}]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


result = fit(replace(recipe, optimizer=optimizer), settings, backend="cpu")
print(f"loss {result.loss:.3f}")
