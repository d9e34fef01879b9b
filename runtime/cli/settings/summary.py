"""`drivetrain summary`: the modules of a recipe's model, with their outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from ...kernel.recipe import Batch, Recipe
from ...run.quoted import quoted
from ...run.tables import table
from ...symbolic.first_batch import first_batch
from ...trainer.memory_parts import size_of

__all__ = ["Row", "show_summary", "summarise"]


@dataclass(frozen=True)
class Row:
    """A module with its children, or several equal modules that follow each other."""

    name: str
    kind: str
    """Name of its class."""
    count: int
    """Number of equal modules; `name` is the first."""
    output: str
    """Shape of the module's output in its first call for one microbatch, such as `8 x 16`. Empty
    where the module was not called, or returned no tensor."""
    parameters: int
    """Elements of the parameters of one module and its children. A parameter that is used in
    several places is counted in each."""
    trainable: int
    num_bytes: int
    """Size of its parameters."""


def summarise(recipe: Recipe, settings: Any, depth: int = 3) -> list[Row]:
    """Return a row for each module of a recipe's model in the order of definition, down to `depth`
    names below the root. The root is the last row.

    The model is built, and the loss of one microbatch computed without gradients, on the host.
    """
    model = recipe.model()
    outputs = _outputs(recipe, model, first_batch(recipe, settings, 1))
    rows = [*_below(model, "", depth, outputs)]
    return [*rows, _row("", [model], outputs)]


def show_summary(rows: Sequence[Row], console: Console) -> None:
    """Print a table of the modules, and the sum."""
    shown = table(
        "module", "class", "output", "parameters", "trainable", "weights", figures=_FIGURES
    )
    *modules, whole = rows
    for row in modules or rows:
        times = f" ({row.count} alike)" if row.count > 1 else ""
        shown.add_row(
            quoted(row.name + times) if row.name else "(the model)",
            quoted(row.kind),
            row.output,
            f"{row.parameters:,}",
            _trainable(row),
            size_of(row.num_bytes),
        )
    console.print(shown)
    console.print(
        quoted(
            f"{whole.kind}: {whole.parameters:,} parameters, {whole.trainable:,} of them "
            f"trainable; weights {size_of(whole.num_bytes)}. `drivetrain explain` has the memory "
            "of a step"
        )
    )


_FIGURES = ("output", "parameters", "trainable", "weights")


def to_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Convert the rows to JSON types."""
    return [asdict(row) for row in rows]


def _below(
    module: nn.Module, prefix: str, depth: int, outputs: dict[nn.Module, str]
) -> Iterator[Row]:
    """Yield rows of the children. Equal children that follow each other are one row, and only the
    first is opened."""
    for _, group in groupby(module.named_children(), _likeness):
        named = [*group]
        name = f"{prefix}{named[0][0]}"
        yield _row(name, [child for _, child in named], outputs)
        if depth > 1:
            yield from _below(named[0][1], f"{name}.", depth - 1, outputs)


def _likeness(child: tuple[str, nn.Module]) -> tuple[str, list[tuple[torch.Size, bool]]]:
    """Return the structure of a module; modules with equal structure share a row."""
    return repr(child[1]), [(p.shape, p.requires_grad) for p in child[1].parameters()]


def _row(name: str, modules: Sequence[nn.Module], outputs: dict[nn.Module, str]) -> Row:
    first = modules[0]
    parameters = [*first.parameters()]
    return Row(
        name,
        type(first).__name__,
        len(modules),
        outputs.get(first, ""),
        sum(p.numel() for p in parameters),
        sum(p.numel() for p in parameters if p.requires_grad),
        sum(p.nbytes for p in parameters),
    )


def _outputs(recipe: Recipe, model: nn.Module, batch: Batch) -> dict[nn.Module, str]:
    """Return the shape of each module's output in its first call."""
    found: dict[nn.Module, str] = {}

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, (tuple, list)) and output else output
        if module not in found and isinstance(first, Tensor):
            found[module] = " x ".join(map(str, first.shape)) or "scalar"

    with ExitStack() as hooks, torch.no_grad():
        for module in model.modules():
            hooks.callback(module.register_forward_hook(note).remove)
        recipe.loss(model, batch)
    return found


def _trainable(row: Row) -> str:
    if row.trainable in (0, row.parameters):
        return "yes" if row.trainable else "no" if row.parameters else ""
    return f"{row.trainable / row.parameters:.0%}"
