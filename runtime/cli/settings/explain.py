"""`drivetrain explain`: what a run would do, and the memory that it would need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from ...kernel.contract import Driver
from ...kernel.errors import DrivetrainError
from ...kernel.optional import EstimatesLayout
from ...kernel.recipe import Recipe
from ...registry import (
    find_driver,
    known_backends,
    memory_of_a_rank,
    refuse_unpromised,
    usable_driver,
)
from ...run.quoted import quoted
from ...run.tables import table
from ...symbolic.equal_blocks import EqualBlocks, find_equal_blocks
from ...symbolic.first_batch import first_batch
from ...symbolic.step import NotSymbolic, symbolic_step
from ...trainer.loss_parts import with_parts
from ...trainer.memory_parts import size_of
from ...trainer.sanity import check_sanity_alone
from ...trainer.settings import OptimizerSettings, Settings
from .config_files import of_transformers
from .recipe_file import DEFAULT_RECIPE, load_recipe_file
from .resolve_settings import Layer, resolve, without_backend

__all__ = [
    "activation_bytes",
    "explain",
    "show_explanation",
    "state_bytes",
]

Record = dict[str, Any]

_STAGES_SHOWN = 6


def explain(
    recipe_path: Path | None,
    backends: Sequence[str] | None,
    layers: Sequence[Layer],
    num_ranks: int,
) -> list[Record]:
    """Return one record for each backend (None: all known ones): values, layout, memory, and
    whether it fits. `layers`: see `resolve`.

    `step`: the bytes of the first rank at the fullest moment of a step, by kind, found by running
    the driver's own step without memory (`symbolic.step`). Where that cannot be done,
    `not_symbolic` says why, and `layout` has an estimate by formulas.
    The model is built once, on the host, and checked as at the start of a run. Raises `UsageError`
    for settings that cannot be resolved, and the errors of that check. A backend that refuses the
    plan, or cannot be used here, has the reason in its record.
    """
    recipe_path, layers = of_transformers(recipe_path, layers)
    recipe_file = load_recipe_file(recipe_path or DEFAULT_RECIPE)
    names = known_backends() if backends is None else backends
    if backends is None:
        layers = without_backend(layers)
    first = resolve(recipe_file, find_driver(names[0]), layers)
    recipe = recipe_file.build(first.config)
    model = recipe.model()
    states = state_bytes(recipe, first.settings.optimizer, model)
    if first.settings.average.decay is not None:
        states = _with_averages(states, model)
    activations = cache(partial(activation_bytes, recipe, first.settings, model, num_ranks))
    subject = _Subject(recipe, model, states, activations, find_equal_blocks(recipe), num_ranks)
    check_sanity_alone(with_parts(recipe), first.settings, model)
    records = []
    for name in names:
        driver = usable_driver(name) if name == "auto" else find_driver(name)
        resolved = resolve(recipe_file, driver, layers)
        values = {
            key: {"value": value, "source": resolved.sources[key]}
            for key, value in resolved.values.items()
        }
        record: Record = {
            "backend": driver.name,
            "ranks": num_ranks,
            "settings": values,
            "batches": [
                {"step": stage.step + 1, "size": stage.size}
                for stage in resolved.settings.batch_sizes().stages
            ],
        }
        try:
            options = type(driver.options_type())(
                **{
                    key.removeprefix("backend."): value
                    for key, value in resolved.values.items()
                    if key.startswith("backend.")
                }
            )
            record |= _outlook(driver, resolved.settings, options, subject)
        except DrivetrainError as error:
            record["refused"] = str(error)
        records.append(record)
    return records


@dataclass(frozen=True)
class _Subject:
    """The part of an explanation that is the same for all drivers."""

    recipe: Recipe
    model: nn.Module
    state_bytes: Mapping[str, int]
    activation_bytes: Callable[[], int]
    blocks: EqualBlocks | None
    num_ranks: int


def _outlook(driver: Driver, settings: Settings, options: Any, subject: _Subject) -> Record:
    recipe, num_ranks = subject.recipe, subject.num_ranks
    plan = settings.plan(options)
    refuse_unpromised(driver, plan, num_ranks)
    probe = driver.probe()
    memory = memory_of_a_rank(probe, num_ranks) if probe.usable else 0
    record: Record = {"usable": probe.usable, "reason": probe.reason, "memory_bytes": memory}
    record |= {"layout": None, "step": None, "not_symbolic": probe.reason, "fits": None}
    if isinstance(driver, EstimatesLayout):
        record["layout"] = asdict(
            driver.layout(plan, subject.model, subject.state_bytes, num_ranks)
        )
    if probe.usable:
        batch_of = partial(first_batch, recipe, settings)
        try:
            step = symbolic_step(
                recipe, driver, plan, settings, num_ranks, batch_of, subject.blocks
            )
            record |= {"step": dict(step.bytes), "not_symbolic": ""}
        except NotSymbolic as error:
            record["not_symbolic"] = str(error)
    if record["step"] is None and record["layout"] is not None:
        record["layout"]["activation_bytes"] = subject.activation_bytes()
    needed = sum(_columns(record))
    if needed and memory:
        record["fits"] = needed <= memory
    return {**record, "total_bytes": needed}


_COLUMNS = {
    "weights": ("weights", "frozen", "buffers"),
    "grads": ("gradients",),
    "optim.": ("optimizer",),
    "at times": ("communication", "temporary"),
    "activ.": ("activations",),
}
"""Columns of the table, and the kinds of memory in each."""
_OF_LAYOUT = ("parameter", "gradient", "optimizer", "transient", "activation")
"""The figures of a layout in these columns."""


def _columns(record: Record) -> list[int]:
    """Return the bytes of each column; none if they are not known."""
    step, layout = record["step"], record["layout"]
    if step is not None:
        return [sum(step.get(kind, 0) for kind in kinds) for kinds in _COLUMNS.values()]
    return [] if layout is None else [layout[f"{part}_bytes"] for part in _OF_LAYOUT]


def state_bytes(recipe: Recipe, optimizer: OptimizerSettings, model: nn.Module) -> dict[str, int]:
    """Return the bytes of optimizer state of each trained parameter by FQN.

    Measured: one step on a parameter of that shape alone, so that no more than one parameter's
    state is in memory at a time.
    """
    build = recipe.optimizer or partial(optimizer.build, all_of_them=False)
    known: dict[tuple[Any, ...], int] = {}
    found: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        key: tuple[Any, ...] = (tuple(parameter.shape), parameter.dtype)
        if optimizer.groups:
            key += (name,)
        if key not in known:
            twin = nn.Parameter(torch.zeros(key[0], dtype=key[1]))
            twin.grad = torch.zeros_like(twin)
            trial = build([(name, twin)])
            trial.step()
            values = trial.state[twin].values()
            known[key] = sum(v.nbytes if isinstance(v, Tensor) else 8 for v in values)
        found[name] = known[key]
    return found


def _with_averages(states: Mapping[str, int], model: nn.Module) -> dict[str, int]:
    """Add the bytes of an average of each parameter, in at least float32."""
    sizes = {name: p.numel() * max(p.element_size(), 4) for name, p in model.named_parameters()}
    return {name: size + sizes[name] for name, size in states.items()}


def activation_bytes(recipe: Recipe, settings: Settings, model: nn.Module, num_ranks: int) -> int:
    """Return the bytes that autograd keeps for the backward of one microbatch, measured on the host
    in float32.

    Weights are not counted; storage that several operations keep is counted once.
    """
    batch = first_batch(recipe, settings, num_ranks)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []  # so that no storage is freed and its address used again

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        recipe.loss(model, batch)
    return sum(kept.values())


def show_explanation(records: Sequence[Record], console: Console) -> None:
    """Print a table of the values, if there is one backend, and a table of all layouts."""
    if len(records) == 1:
        _show_values(records[0], console)
    if len(records[0]["batches"]) > 1:
        console.print(quoted(_batches_of(records[0])))
    sizes = (*_COLUMNS, "total", "of", "fits")
    shown = table("backend", *sizes, figures=sizes)
    remarks = []
    for record in records:
        name = record["backend"]
        if "refused" in record:
            remarks.append(f"{name}: {record['refused']}")
            continue
        if not record["usable"]:
            remarks.append(f"{name}: not usable here: {record['reason']}")
        columns = _columns(record)
        if not columns:
            remarks.append(f"{name}: this driver does not estimate memory")
            continue
        parts = [size_of(size) for size in (*columns, record["total_bytes"])]
        fits = {True: "yes", False: "NO", None: "?"}[record["fits"]]
        memory = size_of(record["memory_bytes"]) if record["memory_bytes"] else "?"
        shown.add_row(name, *parts, memory, fits)
        remarks += _remarks(record)
    console.print(f"Memory of one of {records[0]['ranks']} ranks, at the fullest moment of a step:")
    console.print(shown)
    for remark in remarks:
        console.print(quoted(remark))


def _remarks(record: Record) -> list[str]:
    name, layout = record["backend"], record["layout"]
    found = []
    if record["step"] is None and record["usable"]:
        found.append(
            f"{name}: estimated by formulas, since its step does not run without memory: "
            f"{record['not_symbolic']}"
        )
    if layout is not None:
        found += [f"{name}: {note}" for note in layout["notes"]]
        if layout["units"]:
            found.append(f"{name}: wraps {', '.join(layout['units'])}")
    return found


def _show_values(record: Record, console: Console) -> None:
    shown = table("setting", "value", "from")
    for key, entry in record["settings"].items():
        shown.add_row(*(quoted(str(each)) for each in (key, entry["value"], entry["source"])))
    console.print(shown)


def _batches_of(record: Record) -> str:
    sizes = [f"{stage['size']} from step {stage['step']}" for stage in record["batches"]]
    if len(sizes) > _STAGES_SHOWN:
        sizes[_STAGES_SHOWN - 1 : -1] = [f"... ({len(sizes)} sizes)"]
    return f"Global batch: {', '.join(sizes)}; the last one of an epoch may be smaller."
