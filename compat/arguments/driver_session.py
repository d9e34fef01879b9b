"""The driver that the arguments choose, its session, and the engine of the wrapped model."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...data.parent import end_with_launcher
from ...kernel.contract import Driver, Engine, Session, WatchesRanks, World
from ...kernel.plan import Plan
from ...kernel.recipe import Recipe
from ...kernel.registry import usable_driver
from ...trainer.late_ranks import give_up
from .backend import chosen, planned

__all__ = ["DriverSession", "Prepared", "session_of"]

_LOG = logging.getLogger(__name__)

BuildOptimizer = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Prepared:
    """A model that a driver has wrapped, and for what."""

    model: nn.Module
    """As the user knows it."""
    engine: Engine
    plan: Plan
    optimizer: torch.optim.Optimizer
    order: tuple[tuple[str | None, ...], ...]
    """The names of the parameters in each group of the optimizer; None for one of no model."""


class DriverSession:
    """One for each Trainer. Nothing is started until `session` is asked for."""

    def __init__(self, args: Any, model: nn.Module | None = None, clips: bool = True) -> None:
        """`clips`: the driver clips gradients, and not the Trainer, before the optimizer's step;
        DeepSpeed, whose gradients nobody sees, does so in any case.
        """
        choice = chosen(args, model)
        self.args, self.model, self.clips = args, model, clips or choice.driver == "deepspeed"
        self.driver: Driver = usable_driver(choice.driver)
        self.why = choice.why
        self._start_closed()

    def _start_closed(self) -> None:
        self.prepared: Prepared | None = None
        self._open = ExitStack()
        self._session: Session | None = None
        self._plan: Plan | None = None
        atexit.register(self._open.close)  # which knows nothing of the model

    def __getstate__(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in ("args", "model", "clips", "driver", "why")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy, as in a worker of Ray, brings up a session of its own."""
        vars(self).update(state)
        self._start_closed()

    @property
    def session(self) -> Session:
        """The process group and the device; brought up at the first call."""
        return self._session or self.meet(self.plan())

    @property
    def world(self) -> World:
        """The rank, size and device of this process."""
        return self.session.world

    @property
    def open_world(self) -> World | None:
        """`world`, where the session is up already."""
        return None if self._session is None else self._session.world

    @property
    def engine(self) -> Engine:
        """The engine of the wrapped model; `prepare` must have been called."""
        return self.wrapped().engine

    def wrapped(self) -> Prepared:
        """The result of `prepare`. Raises RuntimeError where it has not been called."""
        if self.prepared is None:
            raise RuntimeError(
                f"{self.driver.name} has not wrapped the model yet, as a loop of your own has it "
                "do by self._wrap_model(self.model)"
            )
        return self.prepared

    def ranks_along(self, dimension: str) -> int:
        """Along that dimension of a mesh; 1 on a driver that has none."""
        return int(getattr((self._plan or self.plan()).options, dimension, 1))

    def is_sharded(self) -> bool:
        """A rank holds only a part of the weights."""
        return self.driver.capabilities(self.plan()).sharded

    def has_cut(self, model: Any) -> bool:
        """It has wrapped this model, of which a rank holds only a part."""
        known = self.prepared
        return (
            known is not None and model in (known.model, known.engine.module) and self.is_sharded()
        )

    def plan(self) -> Plan:
        """The plan for the arguments as they are now. Raises `ArgumentRefused`."""
        plan = planned(self.args, self.model)
        return plan if self.clips else replace(plan, max_grad_norm=None)

    def meet(self, plan: Plan) -> Session:
        """A session under that plan. The process group of the first one serves all."""
        end_with_launcher()
        if self._session is None or not _same(plan, self._plan):
            self._session = self._open.enter_context(self.driver.open(plan))
            if self._session.world.size > 1 and self.driver.capabilities(plan).stall_seconds:
                cast(WatchesRanks, self._session).watch(_warn_of_late)
            self._plan = plan
        return self._session

    def give_up(self, why: str, retry: bool) -> bool:
        """See `WatchesRanks`; True where nobody hears it."""
        session, plan = self._session, self._plan
        if session is None or plan is None:
            return True
        return give_up(session, self.driver.capabilities(plan), why, retry)

    def recipe(self, model: nn.Module, **more: Any) -> Recipe:
        """The kernel's recipe for a model that exists."""
        return Recipe(model=lambda: model, **{"loss": _no_loss, "step": _no_loss, **more})

    def prepare(self, model: nn.Module, optimizer: BuildOptimizer, **more: Any) -> Engine:
        """Wrap the model, or give the engine that has it under the same plan. `more`: what else its
        recipe says.
        """
        plan, known = self.plan(), self.prepared
        if known and model in (known.model, known.engine.module) and _same(known.plan, plan):
            return known.engine
        session, built = self.meet(plan), []
        order: list[tuple[str | None, ...]] = []

        def build(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
            named = list(named)
            names = {id(parameter): name for name, parameter in named}
            built.append(made := optimizer(named))
            order.extend(tuple(names.get(id(p)) for p in g["params"]) for g in made.param_groups)
            return made

        before = session.rng_state()
        engine = session.prepare(self.recipe(model, optimizer=build, **more))
        session.set_rng_state(before)  # wrapping draws no random numbers of the user's
        self.prepared = Prepared(model, engine, plan, built[-1], tuple(order))
        return engine

    def autocast(self) -> AbstractContextManager[Any]:
        """Around every forward."""
        if self.prepared:
            return self.prepared.engine.autocast()
        precision = (self._plan or self.plan()).precision
        if precision.compute == precision.params:
            return nullcontext()
        return torch.autocast(self.world.device.type, precision.compute)

    def close(self) -> None:
        """Leave the process group, together with the other ranks."""
        self.prepared = self._session = self._plan = None
        self._open.close()
        atexit.unregister(self._open.close)


def session_of(args: Any) -> DriverSession:
    """The one in which the process of these arguments trains, made when nobody has done so yet."""
    if getattr(args, "_driver_session", None) is None:
        args._driver_session = DriverSession(args)
    session: DriverSession = args._driver_session
    return session


def _same(plan: Plan, other: Plan | None) -> bool:
    """True if an engine made under one plan serves the other: batch sizes are the loop's."""
    sizes = {"global_batch": plan.global_batch, "micro_batch": plan.micro_batch}
    return other is not None and plan == replace(other, **sizes)  # type: ignore[arg-type]


def _warn_of_late(rank: int, seconds: float, what: str) -> None:
    _LOG.warning("rank %s has kept others waiting for %.0f s: %s", rank, seconds, what)


def _no_loss(module: nn.Module, batch: Any, microstep: Any = None) -> Tensor:
    raise AssertionError("the Trainer's own step computes the loss")
