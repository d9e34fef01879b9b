"""Protocols that a driver may offer besides the contract, for settings and reports that need more.

An object offers a protocol by having its methods. Callers ask by `isinstance`, for `WatchesRanks`
by a promise. From Python 3.12 on `isinstance` does not see methods that `__getattr__` passes on.
As in `contract`, this file holds types and docstrings and no logic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from .contract import Session
from .plan import Layout, Parts, Plan
from .recipe import Batch, Microstep, Recipe
from .shards import Piece

__all__ = [
    "Audits",
    "AveragesWeights",
    "ChangesWeights",
    "ChecksModels",
    "CountsWaits",
    "EstimatesLayout",
    "GivesBack",
    "HoldsParts",
    "KeepsWrites",
    "LeavesRanks",
    "ListsOptions",
    "NumbersUpdates",
    "RunsBackwardAgain",
    "ShowsUpdates",
    "TakesOverStep",
    "UpdateObserver",
    "WatchesRanks",
]


@runtime_checkable
class ChecksModels(Protocol):
    """A driver that refuses a model before its ranks meet. A run asks it before `open`. Without it,
    such a model is refused in `Session.prepare`."""

    def check_model(self, model: nn.Module, recipe: Recipe, plan: Plan) -> None:
        """Raise `RecipeError` for a model that cannot be trained under this plan, and
        `CapabilityRefused` for what the driver can do with no model. `model` is on meta."""


@runtime_checkable
class EstimatesLayout(Protocol):
    """A driver that predicts the memory that a model needs. `drivetrain explain` asks it if the
    driver's own step cannot run without memory. Without it, the memory stays unknown then."""

    def layout(
        self, plan: Plan, model: nn.Module, state_bytes: Mapping[str, int], world_size: int
    ) -> Layout:
        """Return the memory that the fullest rank needs. Pure. `model`: the recipe's, or on meta
        tensors. `state_bytes`: the optimizer's, for each whole parameter, by FQN."""


@runtime_checkable
class ListsOptions(Protocol):
    """A driver that lists ways to place a model. `drivetrain plan` compares them."""

    def list_options(self, recipe: Recipe, world_size: int) -> Iterator[Mapping[str, Any]]:
        """Yield options by name, those for an accelerator. `check_model` may refuse some."""


@runtime_checkable
class WatchesRanks(Session, Protocol):
    """A session that reports late ranks, and whose ranks abort together, where the driver promises
    `Capabilities.stall_seconds`. Otherwise nobody is watched, and only its default is accepted."""

    def watch(self, report: Callable[[int, float, str], None], /) -> None:
        """From now on call `report(rank, seconds, what)`, on every rank and in another thread, for
        each rank that is alive and keeps others waiting, once a step. `seconds`: how long others
        have waited. `what`: a text on where the rank is, and which rank waits in which call."""

    def abort(self, why: str, retry: bool = True) -> bool:
        """Abort this rank. With `retry`: return True if all ranks call this within seconds; they
        may continue together. Otherwise this rank must end, and the others end, too, within
        seconds, by an error that contains `why`."""


@runtime_checkable
class CountsWaits(Protocol):
    """A session that counts how long its rank waits for others, which a run reports. Without it,
    this time belongs to the parts of a step."""

    @property
    def waited_seconds(self) -> float:
        """Seconds since the session began. Costs no communication."""


@runtime_checkable
class LeavesRanks(Protocol):
    """A session that its rank can leave, for the setting `recover`."""

    def leave(self) -> None:
        """From now on this rank is the world: what ranks exchange and reduce is its own."""


@runtime_checkable
class HoldsParts(Protocol):
    """An engine that says what its rank holds, for `recover`. No method communicates."""

    def part(self) -> tuple[int, int] | None:
        """This rank's part, from 0 on, and the number of parts; None if an update was torn."""

    def begin_step(self) -> None:
        """Keep what a step changes before its update, such as buffers."""

    def held(self) -> Iterator[Piece]:
        """The pieces of `shards` in this part, as kept by the last `begin_step`."""


@runtime_checkable
class TakesOverStep(Protocol):
    """An engine that runs forward and backward itself, as a pipeline schedule needs. The kernel
    calls `step` for each microbatch, inside `Engine.microbatch`, in place of the recipe's loss and
    step. Without it, or where `step` is None, the kernel runs the microbatches one by one."""

    def step(self, module: nn.Module, batch: Batch, microstep: Microstep) -> Tensor:
        """Run a microbatch, now or with a later one of the update; see `Recipe.step`."""


@runtime_checkable
class Audits(Protocol):
    """An engine that detects, during a run, faults that no loss shows. The loop asks it after
    updates 1, 2, 4, 8 and so on, before a log and before a save. Without it, they stay unseen."""

    def audit(self) -> None:
        """Raise `RecipeError`, on all ranks, for a fault such as copies that differ."""


@runtime_checkable
class AveragesWeights(Protocol):
    """An engine that keeps averages of its weights, for the setting `average.decay`. Without it the
    setting is refused. Averages are at least float32, and pieces of the optimizer in `shards`,
    `<fqn>/average`; `restore` takes them over, or else forgets them."""

    def average(self, weight: float) -> None:
        """Move each average by `weight` of the way to its weight; a new one begins as the weight.
        Called by all ranks, at most once after each applied update."""

    def averaged(self) -> AbstractContextManager[Any]:
        """Show averages, where there are some, in place of weights around an evaluation."""


@runtime_checkable
class ChangesWeights(Protocol):
    """An engine whose weights change between updates, for `Recipe.after_update`, else refused."""

    def change_weights(self, change: Callable[[Parts], None]) -> None:
        """Call `change` once, with all parameters, each tied group once. What it writes in place
        stays: the next forward, update and save start from there. Called by all ranks, after an
        applied update and before the next forward."""


@runtime_checkable
class KeepsWrites(Protocol):
    """An engine that does something for a write to a weight to last. Without it, the module's own
    parameters are all that an update, a forward and a save begin with."""

    def open_to_writes(self, where: str) -> AbstractContextManager[Any]:
        """Enclose user's code between two forwards, or in the optimizer's step; `where` names it.
        What this code writes in place to parameters is in the next forward, update and save.
        Raises `RecipeError`, which names the weights and `where`, for a write that is not. Blocks
        may be nested. No ranks meet, and no device is waited for."""


@runtime_checkable
class NumbersUpdates(Protocol):
    """An engine on which an optimizer may draw random numbers. Within an update its generators
    depend on the run's seed, the number of the update, and the part of the weights that the rank
    updates. Copies of weights stay equal, and a resumed run draws what it would have drawn."""

    def number_update(self, number: int, /) -> object:
        """Give the next `update` its number in the run; the first is 1. Called by all ranks."""


class UpdateObserver(Protocol):
    """Receives this rank's parts of each parameter in one update. It changes nothing."""

    def weights(self, parts: Parts) -> None:
        """Receive all weights before the update, each tied group once, by the same names in the
        same order on all ranks. The tensor of a parameter is empty on a rank that holds nothing of
        it. After the update the tensors have the new values. Called by all ranks."""

    def gradients(self, parts: Mapping[str, Tensor]) -> None:
        """Receive the same elements of gradients: averaged over ranks, divided by the loss scale,
        not clipped yet. Called once or more, each time for others that have one on any rank."""


@runtime_checkable
class ShowsUpdates(Protocol):
    """An engine that shows what an update computes with, for `stats.every`, else refused."""

    @property
    def runs_all_modules(self) -> bool:
        """True if each rank runs all modules of the model in a training step."""

    def show_update(self, observer: UpdateObserver | None) -> None:
        """Show the next `update` to an observer; None: to nobody. Raises `CapabilityRefused`, also
        for None, if this engine cannot. Called by all ranks."""


@runtime_checkable
class RunsBackwardAgain(Protocol):
    """An engine whose backward can run without an update. Else only the forward is searched."""

    def without_update(self) -> AbstractContextManager[Any]:
        """Enclose forward and backward of a microbatch whose gradients nobody keeps."""


@runtime_checkable
class GivesBack(Protocol):
    """An engine that undoes its changes of the user's module. A run asks it at its end, if the
    module existed before the run. Without it, the module stays as the driver has changed it."""

    def give_back(self) -> bool:
        """Restore the user's module, with plain whole parameters of the trained values in host
        memory, and end the engine; or change nothing and return False. Called by all ranks."""
