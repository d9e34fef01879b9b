"""Compare a partitioned model with the whole one by gradients, at weights where each one counts.

A loss hides what a gradient shows, and weights that are zero at the start (a head, the output of a
residual branch) hide both. So all weights are moved by a small draw for the comparison, and put
back bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...kernel.errors import RecipeError
from ..common.entered import MIXED_TENSORS
from ..common.graph import nodes_of
from ..common.random_state import rng_state, set_rng_state
from .node_names import name_of, name_of_leaf
from .p2p import RECEIVES_ACTIVATION

__all__ = [
    "SCALES",
    "Verdict",
    "draw",
    "explain_mixed_tensors",
    "judge",
    "last_operations",
    "reached",
    "repeatable_forward",
]

SCALES = (1.0, 0.9, 0.3, 0.0)
"""Distances by which weights are moved, in the order tried: smaller where numbers overflow. A
difference counts as wrong only if the next scale, with another draw, shows one, too. A router that
sends a token elsewhere because of rounding does not repeat that. The second scale is near the
first: what a small part of the model adds is lost in rounding where all weights are small.
"""


class _Tolerance(NamedTuple):
    of_tensor: float
    """Largest difference (L2) of a parameter's gradient, relative to that gradient."""
    of_all: float
    """Largest difference relative to the whole model's gradient; smaller ones are rounding."""
    of_loss: float


_EXACT = _Tolerance(1e-3, 1e-6, 1e-4)
_LOW = _Tolerance(0.2, 0.05, 5e-3)
"""Tolerance in bfloat16 or float16: roundings of 2**-8 average out over positions in a loss."""


class Verdict(NamedTuple):
    """Differences between a partitioned model and the whole one."""

    wrong: dict[str, float]
    """FQN -> difference of the gradients, relative to the whole model's. Empty where they agree."""
    losses: tuple[float, float]
    """Losses of the partitioned and the whole model, on the rank where they differ most."""
    losses_agree: bool

    @property
    def agrees(self) -> bool:
        """True if neither gradients nor losses differ by more than roundings."""
        return self.losses_agree and not self.wrong


def judge(
    names: Sequence[str],
    squares: Sequence[Sequence[float]],
    losses: Sequence[Sequence[float]],
    *,
    low: bool,
) -> Verdict:
    """Compare gradients and losses. `squares`: for each name, the squared L2 norms of the
    difference and of the whole gradient. `losses`: for each rank, those of the partitioned and the
    whole model. `low`: they were computed in 16 bits.
    """
    tolerance = _LOW if low else _EXACT
    total = math.sqrt(math.fsum(whole for _, whole in squares))
    wrong = {}
    for name, (difference, whole) in zip(names, squares, strict=True):
        distance, size = math.sqrt(difference), math.sqrt(whole)
        if distance > tolerance.of_tensor * size + tolerance.of_all * total:
            wrong[name] = distance / size if size else math.inf
    seen, expected = max(losses, key=_relative_difference)
    losses_agree = not _relative_difference((seen, expected)) > tolerance.of_loss
    return Verdict(wrong, (seen, expected), losses_agree)


def _relative_difference(losses: Sequence[float]) -> float:
    """Relative difference of two losses; 0 if one is not a number."""
    seen, expected = losses
    found = abs(seen - expected) / max(abs(expected), 1e-30)
    return 0.0 if math.isnan(found) else found


def draw(shape: Sequence[int], seed: int, device: torch.device, scale: float) -> Tensor:
    """Draw numbers to add to a weight, float32, equal on all ranks. Their deviation is half of the
    usual one of a fresh weight of that shape, and 0.1 for vectors and scalars.
    """
    generator = torch.Generator(device).manual_seed(seed)
    deviation = 0.5 / math.sqrt(max(1, *shape[1:])) if len(shape) > 1 else 0.1
    drawn = torch.randn(tuple(shape), generator=generator, device=device)
    return drawn * (deviation * scale)


@contextmanager
def repeatable_forward(
    module: nn.Module, device: torch.device, training: bool
) -> Iterator[Callable[[], bool]]:
    """Restore modes, random state and attributes that a forward sets, so that the next forward
    draws the same numbers. Without `training` the module is in evaluation mode. Yields a function
    that returns whether random numbers were drawn so far.
    """
    modes = [(part, part.training) for part in module.modules()]
    kept = [(vars(part), dict(vars(part))) for part, _ in modes]
    before = rng_state(device)
    if not training:
        module.eval()

    def has_drawn() -> bool:
        now = rng_state(device)
        return any(not torch.equal(state, now[name]) for name, state in before.items())

    try:
        yield has_drawn
    finally:
        set_rng_state(device, before)
        for part, mode in modes:
            part.training = mode
        for now, earlier in kept:
            _restore_attributes(now, earlier)


def _restore_attributes(now: dict[str, Any], earlier: Mapping[str, Any]) -> None:
    """Restore attributes that a forward has set on a module: an auxiliary loss, or a count of its
    calls.
    """
    for name, value in list(now.items()):
        counted = type(value) in (int, float) and value != earlier.get(name, value)
        if counted or (isinstance(value, Tensor) and value.grad_fn is not None):
            if name in earlier:
                now[name] = earlier[name]
            else:
                del now[name]


@contextmanager
def explain_mixed_tensors() -> Iterator[None]:
    """Explain torch's error about an operation on both whole and partitioned tensors."""
    try:
        yield
    except RuntimeError as error:
        if MIXED_TENSORS not in str(error):
            raise
        raise RecipeError(
            f"a partitioned layer computes with more than its weights and what it is given: "
            f"{error} What stands in for a layer, such as an adapter, may use nothing else (LoRA "
            "does not; DoRA does). Take another adapter, or set backend.tensor=1"
        ) from error


_NUM_COMPARED_OPERATIONS = 32


@cache
def _names_between_stages() -> frozenset[str]:
    """Return the names of the autograd nodes through which a stage receives activations, with and
    without a schedule.
    """
    return frozenset({name_of_leaf(), name_of(RECEIVES_ACTIVATION)})


def last_operations(loss: Tensor) -> tuple[str, ...]:
    """Return the operations that a loss ends in, the last ones first. They distinguish one
    computation of a loss from another.
    """
    names = (node.name() for node in nodes_of(loss))
    found = (name for name in names if name not in _names_between_stages())
    return tuple(islice(found, _NUM_COMPARED_OPERATIONS))


def reached(loss: Tensor, names: Mapping[nn.Parameter, str], barrier: str) -> set[str]:
    """Return the names of the parameters from which the loss is reached without passing `barrier`,
    the name of an operation.
    """
    variables = (getattr(node, "variable", None) for node in nodes_of(loss, {barrier}))
    return {names[each] for each in variables if each is not None and each in names}
