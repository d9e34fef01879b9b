"""Several data sets: those to train on are joined, those to evaluate on have names, and each its
own metrics."""

from dataclasses import replace

from base import held_out, recipe, settings, train_data
from torch.utils.data import ConcatDataset, Subset

from drivetrain import fit

joined = ConcatDataset([Subset(train_data, range(100)), Subset(train_data, range(200, 300))])
several = replace(
    recipe,
    train_data=joined,
    eval_data={"held_out": held_out, "left_out": Subset(train_data, range(100, 200))},
)
result = fit(several, settings, backend="cpu")
print({name: round(metrics["loss"], 3) for name, metrics in result.metrics.items()})
