"""Training data drawn from two sources by weight, and by other weights later on."""

from dataclasses import replace

from base import recipe, settings, train_data
from torch.utils.data import Subset

from drivetrain import Mix, fit

small, large = Subset(train_data, range(50)), Subset(train_data, range(50, len(train_data)))
mixture = Mix({"small": (small, 0.4), "large": (large, 0.6)}, stages=[(100, {"small": 0.1})])
result = fit(replace(recipe, train_data=mixture), settings, backend="cpu")
samples = result.step * settings.global_batch
print(mixture.drawn(samples), mixture.epochs(samples))
