"""A loader that makes batches itself, such as torch's: each rank's loader brings that rank's, and
a resumed run continues at the batch where it stopped."""

from dataclasses import replace

from base import recipe, settings, train_data
from torch.utils.data import DataLoader

from drivetrain import Batches, fit

loader = DataLoader(train_data, batch_size=30, shuffle=True)
result = fit(replace(recipe, train_data=Batches(loader)), settings, backend="cpu")
print(f"step {result.step}: {result.metrics}")
