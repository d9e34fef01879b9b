"""Statistics by parameter, on request: gradient, weights and update, added up over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from ..kernel.contract import Session
from ..kernel.errors import CapabilityRefused, SettingError
from ..kernel.events import Event
from ..kernel.loop import TrainLoop
from ..kernel.optional import ShowsUpdates
from ..kernel.plan import Parts
from .activations import Activations
from .settings import Settings
from .shown_updates import CountedParts
from .step_clock import COMPUTE

__all__ = ["Statistics", "Stats"]


@dataclass(frozen=True)
class Stats(Event):
    """The statistics of one step; an event, equal on all ranks.

    A number is None if it is unknown, as that of a gradient that does not exist. A norm is not
    finite if an element is not.
    """

    step: int
    parameters: Mapping[str, Mapping[str, float | None]]
    """By FQN: `grad_norm` (before clipping), `weight_norm` (before the update), `update_norm`,
    `update_ratio` (`update_norm` divided by `weight_norm`), `grad_zeros` and `weight_zeros` (shares
    of the elements), `grad_nonfinite` and `weight_nonfinite` (numbers of elements)."""
    activations: Mapping[str, Mapping[str, float | None]]
    """By module: `mean`, `std` and `max_abs` of the finite elements, `zeros` and `nonfinite`
    (shares of all elements)."""


class Statistics:
    """Measures the steps that are due by `stats.every`. Called by all ranks in the same order.

    Of several ranks that hold the same elements of a parameter, one counts them. `take` adds up the
    numbers of all ranks, as one vector, after a log has waited for the device.
    """

    def __init__(self, settings: Settings, engine: object, session: Session, driver: str) -> None:
        """Raises `CapabilityRefused` if the driver shows no updates."""
        every = settings.stats.every
        if not isinstance(engine, ShowsUpdates):
            raise CapabilityRefused(
                f"stats.every={every}",
                driver,
                "it does not show its gradients; set stats.every=0, or take another driver",
            )
        engine.show_update(None)  # may raise
        if settings.stats.activations and not engine.runs_all_modules:
            raise CapabilityRefused(
                f"stats.activations={[*settings.stats.activations]}",
                driver,
                "each rank runs only some of the modules (backend.pipeline, say); leave it out",
            )
        self._engine: ShowsUpdates = engine
        self._session, self._period = session, every * settings.log_every
        self._activations = Activations(settings, session.world)
        self._counted = CountedParts(session)
        self._weights: Mapping[str, Tensor] = {}
        self._before: Mapping[str, Tensor] = {}
        self._gradients: dict[str, tuple[int, Tensor]] = {}
        self._measured: tuple[int, Mapping[str, _Sums]] | None = None

    @classmethod
    def of(
        cls, settings: Settings, engine: object, session: Session, driver: str
    ) -> Statistics | None:
        """Return the statistics of a run; None if its settings ask for none."""
        if settings.stats.every:
            return cls(settings, engine, session, driver)
        if settings.stats.activations:
            raise SettingError(
                "stats.activations is set, and stats.every=0 measures nothing; set stats.every=1, "
                "say"
            )
        return None

    # --- the steps of a run -----------------------------------------------------------------

    @contextmanager
    def watching(self, loop: TrainLoop) -> Iterator[None]:
        """Surround the steps of the run."""
        self._activations.choose_modules(loop.engine)
        mark = loop.mark

        def watch_forwards(part: str) -> None:
            if self._is_due(loop.progress.step + 1):
                self._activations.watch(part == COMPUTE)
            mark(part)

        loop.mark = watch_forwards
        try:
            yield
        finally:
            self._activations.end()

    def before_update(self, step: int) -> None:
        """Watch the update of a step that is due, after its forwards."""
        self._measured = None
        if self._is_due(step):
            self._activations.end()
            self._gradients = {}
            self._engine.show_update(self)

    @torch.no_grad()
    def after_update(self, step: int) -> None:
        """Measure a step that is due. Waits for nothing."""
        if not self._is_due(step):
            return
        found = {}
        for name, old in self._before.items():
            weight, update = _measure(old), _square(self._weights[name] - old)
            grad_size, gradient = self._gradients.get(name, (0, torch.zeros_like(weight)))
            sums = torch.cat([weight, update.view(1), gradient])
            found[name] = _Sums(old.numel(), grad_size, sums)
        self._measured = step, found
        self._weights, self._before, self._gradients = {}, {}, {}

    def take(self, step: int) -> Stats | None:
        """Return the statistics of the step that is logged, if it was due. Waits for the device and
        for other ranks."""
        measured, self._measured = self._measured, None
        if measured is None or measured[0] != step:
            return None
        names, own = self._counted.names, self._list(measured[1])
        own += self._activations.take()
        added = self._session.tally(own)()
        rows = [added[start : start + _WIDTH] for start in range(0, len(names) * _WIDTH, _WIDTH)]
        return Stats(
            step,
            _rounded({name: _figures(*row) for name, row in zip(names, rows, strict=True)}),
            _rounded(self._activations.figures(added[len(names) * _WIDTH :])),
        )

    def _list(self, measured: Mapping[str, _Sums]) -> list[float]:
        """List the numbers of each parameter, zeros for those that this rank does not count."""
        device = self._session.world.device
        stacked = [each.sums.to(device) for each in measured.values()]
        values = iter(torch.stack(stacked).tolist() if stacked else ())
        listed: list[float] = []
        for name in self._counted.names:
            found = measured.get(name)
            listed += (
                [0.0] * _WIDTH if found is None else [found.size, found.grad_size, *next(values)]
            )
        return listed

    def _is_due(self, step: int) -> bool:
        return step % self._period == 0

    # --- an update (see `UpdateObserver`) -------------------------------------------------------

    def weights(self, parts: Parts) -> None:
        self._counted.choose(parts)
        own = self._counted.own
        self._weights = {name: part for name, (part, _) in parts.items() if name in own}
        self._before = {name: part.clone() for name, part in self._weights.items()}

    @torch.no_grad()
    def gradients(self, parts: Mapping[str, Tensor]) -> None:
        for name, part in parts.items():
            if name in self._counted.own:
                self._gradients[name] = part.numel(), _measure(part)


@dataclass(frozen=True)
class _Sums:
    """Sums over the elements of one parameter that this rank counts."""

    size: int
    grad_size: int
    """0 without a gradient."""
    sums: Tensor
    """The three sums of the weights, the squares of the update, the three sums of the gradient;
    float64 (7,). See `_measure`."""


_WIDTH = 9
"""Numbers of a parameter in the vector that ranks add up."""


def _measure(part: Tensor) -> Tensor:
    """Return the sum of squares, the number of zeros and the number of elements that are not
    finite; float64 (3,)."""
    if part.layout is not torch.strided:
        part = part.to_dense()
    counts = ((part == 0).sum(), (~torch.isfinite(part)).sum())
    return torch.stack([_square(part), *(each.double() for each in counts)])


def _square(part: Tensor) -> Tensor:
    """Return the sum of squares, in float64."""
    real = torch.view_as_real(part) if part.is_complex() else part
    return cast(Tensor, torch.linalg.vector_norm(real, dtype=torch.float64)).square()


def _rounded(
    figures: Mapping[str, Mapping[str, float | None]],
) -> dict[str, dict[str, float | None]]:
    """Round to nine digits, which keeps records short."""
    return {
        name: {key: None if value is None else float(f"{value:.9g}") for key, value in of.items()}
        for name, of in figures.items()
    }


def _figures(
    size: float,
    grad_size: float,
    weight: float,
    weight_zeros: float,
    weight_nonfinite: float,
    update: float,
    grad: float,
    grad_zeros: float,
    grad_nonfinite: float,
) -> dict[str, float | None]:
    weight_norm, update_norm = math.sqrt(weight), math.sqrt(update)
    return {
        "grad_norm": math.sqrt(grad) if grad_size else None,
        "weight_norm": weight_norm,
        "update_norm": update_norm,
        "update_ratio": update_norm / weight_norm if weight_norm else None,
        "grad_zeros": grad_zeros / grad_size if grad_size else None,
        "weight_zeros": weight_zeros / size if size else None,
        "grad_nonfinite": grad_nonfinite if grad_size else None,
        "weight_nonfinite": weight_nonfinite,
    }
