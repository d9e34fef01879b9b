"""The driver that the arguments select, its session, and the engine of the wrapped model."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from ...data.fork_gc import stay_forkable
from ...data.parent import end_with_launcher
from ...kernel.contract import Driver, Engine, Session, World
from ...kernel.optional import GivesBack, WatchesRanks
from ...kernel.plan import Plan
from ...kernel.recipe import Recipe
from ...registry import usable_driver
from ...trainer.late_ranks import abort_ranks
from ...trainer.weight_writes import open_to_writes
from .backend import chosen, planned

__all__ = ["DriverSession", "Prepared", "session_of", "take_back"]

_LOG = logging.getLogger(__name__)

BuildOptimizer = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Prepared:
    """A model that a driver has wrapped, and the plan for which it was wrapped."""

    model: nn.Module
    """The model as the user knows it."""
    engine: Engine
    plan: Plan
    optimizer: torch.optim.Optimizer
    order: tuple[tuple[str | None, ...], ...]
    """The names of the parameters in each group of the optimizer; None for a parameter that is not
    the model's."""


class DriverSession:
    """The driver of one Trainer. Nothing is started until `session` is read."""

    of_arguments = False
    """True if it was created for arguments before a Trainer had them; that Trainer closes it."""

    def __init__(self, args: Any, model: nn.Module | None = None, clips: bool = True) -> None:
        """`clips`: the driver, not the Trainer, clips gradients before the optimizer's step.
        DeepSpeed, whose gradients are not accessible, does so in any case.
        """
        choice = chosen(args, model)
        self.args, self.model, self.clips = args, model, clips or choice.driver == "deepspeed"
        self.driver: Driver = usable_driver(choice.driver)
        self.why = choice.why
        self._start_closed()

    def _start_closed(self) -> None:
        self.prepared: Prepared | None = None
        self.has_given_back = False
        """True once the wrapped parameters are no longer those of the model."""
        self._open = ExitStack()
        self._session: Session | None = None
        self._plan: Plan | None = None
        atexit.register(self._open.close)  # which does not depend on the model

    def __getstate__(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in ("args", "model", "clips", "driver", "why")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, as in a Ray worker, which opens its own session."""
        vars(self).update(state)
        self._start_closed()

    @property
    def session(self) -> Session:
        """The process group and the device; opened on first use."""
        return self._session or self.open_session(self.plan())

    @property
    def world(self) -> World:
        """The rank, size and device of this process."""
        return self.session.world

    @property
    def open_world(self) -> World | None:
        """`world`, if the session is open already; else None."""
        return None if self._session is None else self._session.world

    @property
    def engine(self) -> Engine:
        """The engine of the wrapped model; `prepare` must have been called."""
        return self.wrapped().engine

    def wrapped(self) -> Prepared:
        """Return the result of `prepare`. Raises RuntimeError if it has not been called."""
        if self.prepared is None:
            raise RuntimeError(
                f"{self.driver.name} has not wrapped the model yet, as a loop of your own has it "
                "do by self._wrap_model(self.model)"
            )
        return self.prepared

    def ranks_along(self, dimension: str) -> int:
        """Return the number of ranks along a dimension of the mesh; 1 on a driver without a
        mesh."""
        return int(getattr((self._plan or self.plan()).options, dimension, 1))

    def is_sharded(self) -> bool:
        """True if a rank holds only a part of the weights."""
        return self.driver.capabilities(self.plan()).sharded

    def is_partitioned(self, model: Any) -> bool:
        """True if this session has wrapped the model, and a rank holds only a part of it."""
        known = self.prepared
        return (
            known is not None and model in (known.model, known.engine.module) and self.is_sharded()
        )

    def plan(self) -> Plan:
        """Return the plan for the present arguments. Raises `ArgumentRefused`."""
        plan = planned(self.args, self.model)
        return plan if self.clips else replace(plan, max_grad_norm=None)

    def open_session(self, plan: Plan) -> Session:
        """Return a session with a plan. All sessions share the process group of the first one."""
        end_with_launcher()
        if self._session is None or not _same(plan, self._plan):
            self._session = self._open.enter_context(self.driver.open(plan))
            stay_forkable()
            if self._session.world.size > 1 and self.driver.capabilities(plan).stall_seconds:
                cast(WatchesRanks, self._session).watch(_warn_of_late)
            self._plan = plan
        return self._session

    def abort_ranks(self, why: str, retry: bool) -> bool:
        """Report to the other ranks that this rank cannot continue; see
        `late_ranks.abort_ranks`."""
        session, plan = self._session, self._plan
        if session is None or plan is None:
            return True
        return abort_ranks(session, self.driver.capabilities(plan), why, retry)

    def recipe(self, model: nn.Module, **more: Any) -> Recipe:
        """Return the kernel's recipe for an existing model."""
        return Recipe(model=lambda: model, **{"loss": _no_loss, "step": _no_loss, **more})

    def prepare(self, model: nn.Module, optimizer: BuildOptimizer, **more: Any) -> Engine:
        """Wrap the model, or return the engine that wraps it under the same plan. `more`: further
        fields of its recipe.
        """
        plan, known = self.plan(), self.prepared
        if known and model in (known.model, known.engine.module) and _same(known.plan, plan):
            return known.engine
        take_back(model, self)
        session, built = self.open_session(plan), []
        order: list[tuple[str | None, ...]] = []

        def build(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
            named = list(named)
            # an optimizer holds these, or the model's own, which these may replace
            pairs = [*model.named_parameters(), *named]
            names = {id(parameter): name for name, parameter in pairs}
            built.append(made := optimizer(named))
            order.extend(tuple(names.get(id(p)) for p in g["params"]) for g in made.param_groups)
            return made

        before = session.rng_state()
        engine = session.prepare(self.recipe(model, optimizer=build, **more))
        session.set_rng_state(before)  # wrapping must not advance the user's random generators
        self.prepared = Prepared(model, engine, plan, built[-1], tuple(order))
        _HELD[model] = ref(self)
        return engine

    def give_back(self) -> bool:
        """Restore the wrapped model to a whole one with the trained weights, if the driver has
        changed it in place. Return False if it has not, or cannot restore it. Called by all
        ranks."""
        known = self.prepared
        if known is None or not isinstance(known.engine, GivesBack):
            return False
        if given_back := known.engine.give_back():
            self.prepared, self.has_given_back = None, True
        return given_back

    def follow_groups(self) -> None:
        """Take over groups that were added to the optimizer since the model was wrapped."""
        known = self.wrapped()
        if added := known.optimizer.param_groups[len(known.order) :]:
            names = {id(parameter): name for name, parameter in known.model.named_parameters()}
            more = (tuple(names.get(id(p)) for p in group["params"]) for group in added)
            self.prepared = replace(known, order=(*known.order, *more))

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of every forward."""
        if self.prepared:
            return self.prepared.engine.autocast()
        precision = (self._plan or self.plan()).precision
        if precision.compute == precision.params:
            return nullcontext()
        return torch.autocast(self.world.device.type, precision.compute)

    def open_to_writes(self, code: Any, where: str) -> AbstractContextManager[Any]:
        """Return a context manager around a call of user's code; see `KeepsWrites`. A model that is
        not wrapped keeps each write."""
        return open_to_writes(self._engine, code, where)

    @property
    def _engine(self) -> Engine | None:
        return None if self.prepared is None else self.prepared.engine

    def close(self, gives_back: bool = False) -> None:
        """Leave the process group, together with the other ranks; before that call `give_back` if
        requested."""
        if gives_back:
            self.give_back()
        self.prepared = self._session = self._plan = None
        self._open.close()
        atexit.unregister(self._open.close)


_HELD: WeakKeyDictionary[nn.Module, ref[DriverSession]] = WeakKeyDictionary()
"""The session that wrapped each model last."""


def take_back(model: nn.Module, by: DriverSession) -> None:
    """Restore this model if another Trainer's session has wrapped it. Called by all ranks."""
    held = _HELD.get(model)
    holder = None if held is None else held()
    known = None if holder is None or holder is by else holder.prepared
    if holder is not None and known is not None and known.model is model:
        holder.give_back()


def session_of(args: Any) -> DriverSession:
    """Return the session in which the process of these arguments trains; create it on first use."""
    if getattr(args, "_driver_session", None) is None:
        args._driver_session = DriverSession(args)
        args._driver_session.of_arguments = True
    session: DriverSession = args._driver_session
    return session


def _same(plan: Plan, other: Plan | None) -> bool:
    """True if an engine made under one plan can be used for the other: batch sizes concern only the
    loop."""
    sizes = {"global_batch": plan.global_batch, "micro_batch": plan.micro_batch}
    return other is not None and plan == replace(other, **sizes)  # type: ignore[arg-type]


def _warn_of_late(rank: int, seconds: float, what: str) -> None:
    _LOG.warning("rank %s has kept others waiting for %.0f s: %s", rank, seconds, what)


def _no_loss(module: nn.Module, batch: Any, microstep: Any = None) -> Tensor:
    raise AssertionError("the Trainer's own step computes the loss")
