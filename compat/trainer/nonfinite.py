"""Names the first tensor of a step that is not finite, if `find_nonfinite` requests it."""

from __future__ import annotations

import copy
import logging
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ...kernel.batches import Group, Microbatch
from ...kernel.events import StepSkipped
from ...kernel.recipe import Batch
from ...trainer.nonfinite import NonFiniteFound, NonFiniteSearch, Rerun
from ...trainer.settings import PRECISIONS
from ..arguments.backend import settings
from ..common.overrides import is_overridden
from .hf_terms import in_hf_terms

__all__ = ["FirstNonFinite"]

_LOG = logging.getLogger(__name__)

_STEP = ("training_step", "_prepare_inputs", "_prepare_context_parallel_inputs")
"""Methods of a step that the search leaves out, or calls as they are here. Subclasses that override
them generate samples, keep buffers or run several models in them."""
_CONTAINERS = (dict, defaultdict, OrderedDict, Counter, list, set, deque)
_DATA = ("train_dataset", "eval_dataset")


class FirstNonFinite(NonFiniteSearch):
    """The search of one call of `train`. Called by all ranks in the same order.

    It runs `compute_loss` again on the microbatches of a step. Methods that a subclass overrides
    find the attributes of the Trainer as they left them.
    """

    def __init__(self, trainer: Any) -> None:
        session, self._trainer = trainer.driver_session, trainer
        self._items_of_step: Any = None
        self._accumulation = 1
        self._loss: Tensor | None = None
        """Loss of the step that runs, as `training_step` has returned it."""
        self._last_loss: Tensor | None = None
        own = [name for name in _STEP if _is_own(trainer, name)]
        self._why_not = ""
        if own:
            self._why_not = (
                f"{type(trainer).__name__}.{own[0]} is not the Trainer's, and may do more than "
                "compute a loss, so that it is not run again: override compute_loss instead"
            )
        rerun = None if own else Rerun(lambda step: self._compute_loss, self._weight)
        engine = session.engine
        super().__init__(rerun, session.session, engine, settings(trainer.args, trainer.model))
        if not own and not self.watches:
            self._why_not = (
                f"the driver {session.driver.name} runs whole steps itself, or keeps no random "
                "state to run them again with"
            )

    def add(self, loss: Tensor) -> None:
        """Add the loss of a microbatch, before `logging_nan_inf_filter` replaces it."""
        loss = loss.detach()
        self._loss = loss if self._loss is None else self._loss + loss

    def after_step(self, group: Group, num_items: Any, accumulation: int) -> None:
        """Note the end of a step, and what its losses were computed with."""
        self.ended(group, 1.0)
        self._items_of_step, self._accumulation = num_items, accumulation
        self._last_loss, self._loss = self._loss, None

    def report(self, event: StepSkipped, group: Group) -> NonFiniteFound | None:
        """Log the first tensor of the step that is not finite, or why it is unknown; return it if
        the step was searched."""
        if self._last_loss is not None:
            loss = float(self.session.reduce(self._last_loss)) / self.session.world.num_feeders
            event = replace(event, loss=loss)
        scales = PRECISIONS[self.settings.precision].loss_scaling  # which overflows by design
        if self._why_not and not (scales and math.isfinite(event.loss)):
            text, self._why_not = self._why_not, ""
            self._warn(f"step {event.step} is not finite: the first tensor is unknown: {text}")
        elif found := self._searched(event, group):
            found = replace(found, text=in_hf_terms(found.text))
            self._warn(found.text)
            return found
        return None

    def _searched(self, event: StepSkipped, group: Group) -> NonFiniteFound | None:
        if not self.watches:
            return None
        trainer = self._trainer
        with _unchanged(trainer, trainer.state, trainer.control):
            trainer.log = _log_nothing
            return self.find(event, group)

    def _warn(self, text: str) -> None:
        if self.session.world.rank == 0:
            _LOG.warning("%s", text)

    def _compute_loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Compute the loss as `training_step` does."""
        trainer = self._trainer
        module.train()  # an evaluation may have followed the step; the search restores the mode
        inputs = trainer._prepare_inputs(batch)
        with trainer.compute_loss_context_manager():
            loss: Tensor = trainer.compute_loss(
                module, inputs, num_items_in_batch=self._items_of_step
            )
        return loss

    def _weight(self, part: Microbatch, num_items: float) -> float:
        scaled = self._trainer._loss_is_scaled(self._items_of_step)
        return 1.0 if scaled else 1 / self._accumulation


def _is_own(trainer: Any, name: str) -> bool:
    """True if a subclass, or the object itself, has a method of its own."""
    return name in vars(trainer) or is_overridden(type(trainer), name)


def _log_nothing(*args: Any, **kwargs: Any) -> None: ...


@contextmanager
def _unchanged(*objects: Any) -> Iterator[None]:
    """Restore the attributes of objects, and the content of those that are containers: a
    `compute_loss` may count, or collect figures."""
    before = [dict(vars(each)) for each in objects]
    contents = [
        (value, _copied(value))
        for attributes in before
        for name, value in attributes.items()
        if type(value) in _CONTAINERS and name not in _DATA
    ]
    try:
        yield
    finally:
        for each, attributes in zip(objects, before, strict=True):
            for name in vars(each).keys() - attributes.keys():
                del vars(each)[name]
            vars(each).update(attributes)
        for container, content in contents:
            container.clear()
            (container.extend if type(container) in (list, deque) else container.update)(content)


def _copied(value: Any, depth: int = 3) -> Any:
    """Return the same leaves in new containers, to a depth that ends in any case."""
    if type(value) not in _CONTAINERS or not depth:
        return value
    made = copy.copy(value)
    if type(value) is not set:
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            made[key] = _copied(each, depth - 1)
    return made
