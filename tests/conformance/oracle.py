"""Right results: the same training in plain PyTorch, one process, float64, without drivetrain.

Each global batch is one forward; its loss is the sum over the batch divided by its items.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .problems import PROBLEMS, Sample

__all__ = ["Trained", "evaluate", "outputs", "train"]


@dataclass(frozen=True)
class Trained:
    """Results of a training: one loss and norm an update, and weights and buffers at the end."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


@contextmanager
def one_thread() -> Iterator[None]:
    """Run the block on one thread: the driver's processes need the cores, and nothing here is
    large.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@one_thread()
def train(
    problem: str,
    weights: Mapping[str, Tensor],
    groups: Sequence[Sequence[int]],
    rates: Sequence[float],
    optimizer: type[torch.optim.Optimizer],
    max_grad_norm: float | None = None,
    max_grad_value: float | None = None,
) -> Trained:
    """Do one update on each group of samples, starting from the given weights."""
    model, measure = load(problem, weights).train(), PROBLEMS[problem].measure
    updater = optimizer(model.parameters(), lr=0.0)  # type: ignore[call-arg]
    losses, norms = [], []
    for group, rate in zip(groups, rates, strict=True):
        batch = batch_of(problem, group)
        loss = measure(model, batch)["loss"] / PROBLEMS[problem].items(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        largest = float("inf") if max_grad_norm is None else max_grad_norm
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), largest)))
        if max_grad_value is not None:
            nn.utils.clip_grad_value_(model.parameters(), max_grad_value)
        losses.append(float(loss.detach()))
        for parameters in updater.param_groups:
            parameters["lr"] = rate
        updater.step()
        updater.zero_grad()
    return Trained(losses, norms, {name: t.detach() for name, t in named(model)})


@one_thread()
def evaluate(problem: str, weights: Mapping[str, Tensor], size: int) -> dict[str, float]:
    """The metrics of `problems.summarise` over the first `size` samples."""
    model, batch = load(problem, weights).eval(), batch_of(problem, range(size))
    with torch.no_grad():
        sums = PROBLEMS[problem].measure(model, batch)
    sums |= {"items": torch.tensor(PROBLEMS[problem].items(batch)), "samples": torch.tensor(size)}
    recipe = PROBLEMS[problem].recipe()
    assert recipe.summarise is not None
    return dict(recipe.summarise(sums))


@one_thread()
def outputs(problem: str, weights: Mapping[str, Tensor], size: int) -> Tensor:
    """Return the model's outputs for the first `size` samples."""
    with torch.no_grad():
        found: Tensor = load(problem, weights).eval()(batch_of(problem, range(size))["x"])
    return found


def load(problem: str, weights: Mapping[str, Tensor]) -> nn.Module:
    model = PROBLEMS[problem].model().double()
    with torch.no_grad():
        for name, tensor in named(model):
            tensor.copy_(weights[name])
    return model


def named(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers."""
    return [*model.named_parameters(), *model.named_buffers()]


def batch_of(problem: str, group: Sequence[int]) -> Sample:
    batch = PROBLEMS[problem].batch(group)
    return {name: t.double() if t.is_floating_point() else t for name, t in batch.items()}
