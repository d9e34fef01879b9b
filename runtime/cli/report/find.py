"""`drivetrain find`: prints the results of a search."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from rich.console import Console

from ...run.format import amount
from ...run.tables import table
from ...trainer.find import LearningRate, MicroBatch

__all__ = ["show_learning_rate", "show_micro_batches"]

_ROWS = 20


def show_learning_rate(found: LearningRate, console: Console) -> None:
    """Print the losses at about twenty of the rates, and the suggestion."""
    shown = table("learning rate", "loss", figures=("learning rate", "loss"))
    every = max(1, len(found.rates) // _ROWS)
    pairs = [*zip(found.rates, found.losses, strict=True)]
    for rate, loss in pairs[::every]:
        shown.add_row(f"{rate:.2e}", f"{loss:.4g}")
    console.print(shown)
    if found.suggestion is None:
        console.print("the loss did not fall: try other bounds, or look at the recipe")
    else:
        console.print(
            f"a tenth of the rate with the least loss: --set optimizer.lr={found.suggestion:.1e}"
        )


def show_micro_batches(found: Iterable[MicroBatch], console: Console) -> list[dict[str, Any]]:
    """Print each size when it was tried, and the largest that fits; return them as JSON types."""
    tried: list[MicroBatch] = []
    for each in found:
        tried.append(each)
        speed = each.samples_per_second
        result = "out of memory" if speed is None else f"{amount(speed)} samples/s"
        console.print(f"micro_batch {each.size}: {result}")
    fitted = [each for each in tried if each.samples_per_second is not None]
    if fitted:
        size = fitted[-1].size
        console.print(f"the largest that fits is {size}: --set micro_batch={size}")
    return [asdict(each) for each in tried]
