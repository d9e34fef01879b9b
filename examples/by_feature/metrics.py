"""Metrics of your own: sums over a batch, and what to make of the sums over all the data. They are
exact for any size of batch and any number of processes."""

from dataclasses import replace

import torch.nn.functional as F
from base import recipe, settings

from drivetrain import EvaluateSettings, fit


def measure(module, batch):
    logits = module(batch[0])
    return {
        "loss": F.cross_entropy(logits, batch[1], reduction="sum"),
        "right": (logits.argmax(-1) == batch[1]).sum(),
    }


def summarise(sums):
    """`samples` and `items` are added up by the kernel."""
    return {
        "loss": float(sums["loss"] / sums["samples"]),
        "accuracy": float(sums["right"] / sums["samples"]),
    }


measured = replace(recipe, measure=measure, summarise=summarise)
result = fit(measured, replace(settings, evaluate=EvaluateSettings(every=10)), backend="cpu")
print(result.metrics["held_out"])
