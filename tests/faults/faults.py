"""Planted faults: each is one mistake that drivers make in practice, with the check that must catch
it.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from drivetrain import lost_ranks
from drivetrain.backends.common import models, stepping
from drivetrain.backends.common.entered import Entered
from drivetrain.backends.ddp import DdpOptions
from drivetrain.conformance.resuming import WeightsAlone
from drivetrain.kernel.contract import Outcome, World
from drivetrain.kernel.errors import CheckpointError, CollectiveFailed, RecipeError
from drivetrain.kernel.optional import TakesOverStep
from drivetrain.kernel.plan import Capabilities, Plan
from drivetrain.kernel.recipe import Batch, Recipe
from drivetrain.kernel.shards import Kind, Piece, Reader


class Wrapped:
    """Forwards everything to the inner object, except what a fault replaces."""

    def __init__(self, inner: Any, plan: Plan) -> None:
        self.inner, self.plan = inner, plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class WrappedSession(Wrapped):
    """A session that wraps the engines it prepares."""

    build: type[WrappedEngine]

    def prepare(self, recipe: Recipe) -> WrappedEngine:
        return self.build(self.inner.prepare(recipe), self.plan)

    def leave(self) -> None:
        self.inner.leave()


class WrappedEngine(Wrapped):
    """An engine that keeps the plan, and gives faults access to the gradients."""

    def __init__(self, inner: Any, plan: Plan) -> None:
        super().__init__(inner, plan)
        if isinstance(inner, TakesOverStep):  # isinstance does not look through getattr
            self.step = inner.step

    def grads(self) -> list[Tensor]:
        return [p.grad for p in self.inner.parameters if p.grad is not None]

    def average(self, weight: float) -> None:  # named here: a contract is not seen through getattr
        self.inner.average(weight)

    def averaged(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self.inner.averaged()
        return context

    def change_weights(self, change: Callable[[Mapping[str, Any]], None]) -> None:
        self.inner.change_weights(change)

    def number_update(self, number: int) -> None:
        self.inner.number_update(number)

    def part(self) -> tuple[int, int]:
        part: tuple[int, int] = self.inner.part()
        return part

    def begin_step(self) -> None:
        self.inner.begin_step()

    def held(self) -> Iterator[Piece]:
        held: Iterator[Piece] = self.inner.held()
        return held


T = TypeVar("T")


def unchanged(value: T) -> T:
    return value


@dataclass(frozen=True)
class Fault:
    """A faulty part of a driver. `caught_by` is the check that must catch it: a part of a case's
    name.
    """

    caught_by: str
    engine: type[WrappedEngine] = WrappedEngine
    session: type[WrappedSession] = WrappedSession
    plan: Callable[[Plan], Plan] = unchanged
    capabilities: Callable[[Capabilities], Capabilities] = unchanged


# --- law 1: the gradient -----------------------------------------------------------------------


class CopiesDrift(WrappedEngine):
    """Rounds the weights of the last rank differently, so that copies drift apart."""

    def update(self) -> Outcome:
        outcome: Outcome = self.inner.update()
        if self.inner.world.rank == self.inner.world.size - 1:
            for parameter in self.inner.parameters:
                parameter.data = torch.nextafter(parameter.data, torch.tensor(math.inf))
        return outcome


class MeanOfLocalMeans(WrappedSession):
    """Divides the loss by the items of one feeder instead of the items of all feeders."""

    def tally(self, values: Sequence[float]) -> Callable[[], list[float]]:
        wait = self.inner.tally(values)
        return lambda: [values[0] * self.inner.world.num_feeders, *wait()[1:]]


class SumOverFeeders(WrappedEngine):
    """Sums the gradient over feeders instead of averaging it."""

    def backward(self, loss: Tensor, weight: Tensor) -> None:
        self.inner.backward(loss, weight * self.inner.world.num_feeders)


class WeightForgotten(WrappedEngine):
    """Ignores the weights of losses: each counts as 1."""

    def backward(self, loss: Tensor, weight: Tensor) -> None:
        self.inner.backward(loss, torch.ones_like(weight))


class DividedByAccumulation(WrappedEngine):
    """Averages gradients over the microbatches of an update instead of summing them."""

    count = 0

    def microbatch(self, last: bool) -> AbstractContextManager[Any]:
        self.count += 1
        context: AbstractContextManager[Any] = self.inner.microbatch(last)
        return context

    def update(self) -> Outcome:
        torch._foreach_div_(self.grads(), self.count)
        self.count = 0
        outcome: Outcome = self.inner.update()
        return outcome


class AccumulationOfThePlan(DividedByAccumulation):
    """Scales gradients as if every update had as many microbatches as the largest one."""

    def update(self) -> Outcome:
        plan, world = self.plan, self.inner.world
        planned = math.ceil(
            plan.global_batch / world.num_readers / (plan.micro_batch or plan.global_batch)
        )
        torch._foreach_mul_(self.grads(), self.count / planned)
        self.count = 0
        outcome: Outcome = self.inner.update()
        return outcome


class NeverSynchronised(WrappedEngine):
    """Treats the last of several microbatches as if another one followed, and so skips
    synchronization.
    """

    first = True

    def microbatch(self, last: bool) -> AbstractContextManager[Any]:
        alone, self.first = self.first and last, last
        context: AbstractContextManager[Any] = self.inner.microbatch(alone)
        return context


class NoAutocast(WrappedEngine):
    """Claims bf16, but computes everything in float32."""

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", enabled=False)


class ScalarsSummed(WrappedEngine):
    """Sums the gradients of 0-d parameters over feeders instead of averaging them."""

    def update(self) -> Outcome:
        for grad in self.grads():
            if not grad.dim():
                grad.mul_(self.inner.world.num_feeders)
        outcome: Outcome = self.inner.update()
        return outcome


class OneStepAParameter(WrappedEngine):
    """Calls the optimizer once for each tensor, although some optimizers count calls or sum over
    tensors.
    """

    def update(self) -> Outcome:
        optimizer = self.inner.optimizer
        step, groups = optimizer.step, optimizer.param_groups

        def one_by_one() -> None:
            for group in groups:
                for parameter in group["params"]:
                    optimizer.param_groups = [group]
                    parameters, group["params"] = group["params"], [parameter]
                    step()
                    group["params"] = parameters
            optimizer.param_groups = groups

        optimizer.step = one_by_one
        try:
            outcome: Outcome = self.inner.update()
        finally:
            optimizer.step = step
        return outcome


class OneRateForAll(WrappedEngine):
    """Gives every group the learning rate of the first group."""

    def update(self) -> Outcome:
        first, *others = self.inner.param_groups
        for group in others:
            group["lr"] = first["lr"]
        outcome: Outcome = self.inner.update()
        return outcome


class TrainsAlong(WrappedEngine):
    """Also trains the models that must stay constant in a turn."""

    def __init__(self, inner: Any, plan: Plan) -> None:
        super().__init__(inner, plan)
        inner.module.register_forward_pre_hook(self.let_all_learn)

    def let_all_learn(self, module: nn.Module, args: Any) -> None:
        module.requires_grad_(True)


class TurnsCountedAgain(WrappedSession):
    """Chooses the turn by the number of updates in this process, also in a resumed run."""

    def prepare(self, recipe: Recipe) -> WrappedEngine:
        loss: Any = recipe.loss
        if of_update := getattr(loss, "of_update", None):
            counted = itertools.count(1)
            loss.of_update = lambda number: of_update(next(counted))
        return super().prepare(recipe)


class MatricesInParts(WrappedEngine):
    """Updates each half of a matrix as a matrix of its own."""

    def __init__(self, inner: Any, plan: Plan) -> None:
        super().__init__(inner, plan)
        self.halves: dict[Tensor, list[nn.Parameter]] = {}

    def update(self) -> Outcome:
        groups = [g for g in self.inner.param_groups if "ns_steps" in g]
        whole = [(group, group["params"]) for group in groups]
        for group, parameters in whole:
            group["params"] = [half for p in parameters for half in self.split(p)]
        outcome: Outcome = self.inner.update()
        for group, parameters in whole:
            group["params"] = parameters
        return outcome

    def split(self, parameter: Tensor) -> list[nn.Parameter]:
        made = [nn.Parameter(part) for part in parameter.detach().chunk(2)]
        halves = self.halves.setdefault(parameter, made)
        assert parameter.grad is not None
        for half, grad in zip(halves, parameter.grad.chunk(2), strict=True):
            half.grad = grad
        return halves


class DecaysWithoutAGradient(WrappedEngine):
    """Gives a gradient of zero to each parameter that has no gradient on any rank."""

    def update(self) -> Outcome:
        for parameter in self.inner.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        outcome: Outcome = self.inner.update()
        return outcome


class MomentsOfADecay(DecaysWithoutAGradient):
    """Decays like the base class, and then restores weights and state, except state that the update
    creates.
    """

    def update(self) -> Outcome:
        absent = [p for p in self.inner.parameters if p.grad is None]
        state = self.inner.optimizer.state
        kept = [(p, p.detach().clone(), copy.deepcopy(state.get(p))) for p in absent]
        outcome = super().update()
        for parameter, weights, before in kept:
            parameter.data.copy_(weights)
            if before is not None:
                state[parameter] = before
        return outcome


class MeanOfThoseThatHaveOne(WrappedEngine):
    """Averages a gradient over only those ranks that have one."""

    def update(self) -> Outcome:
        for name, parameter in self.inner.own.named_parameters():
            if name.startswith("spare.") and parameter.grad is not None:
                parameter.grad.mul_(self.inner.world.size)
        outcome: Outcome = self.inner.update()
        return outcome


class NamesNothing(WrappedEngine):
    """Reports unused layers only by the library's own message, without their names."""

    def update(self) -> Outcome:
        if missing := models.without_gradient(self.inner.own):
            raise RecipeError(f"{len(missing)} tensors did not arrive")
        outcome: Outcome = self.inner.update()
        return outcome


def even(able: Capabilities) -> Capabilities:
    return dataclasses.replace(able, uneven_gradients=False)


def finding_unused(plan: Plan) -> Plan:
    return dataclasses.replace(plan, options=DdpOptions(find_unused_parameters=True))


# --- law 2: the norm ---------------------------------------------------------------------------


class OtherNorm(WrappedEngine):
    """Reports a wrong norm."""

    def update(self) -> Outcome:
        grads = [grad.clone() for grad in self.grads()]
        outcome: Outcome = self.inner.update()
        return dataclasses.replace(outcome, grad_norm=self.norm(outcome.grad_norm, grads))

    def norm(self, right: Tensor, grads: list[Tensor]) -> Tensor:
        raise NotImplementedError


class NormOfTheLocalShard(OtherNorm):
    """Computes the norm of each rank's own part of the parameters."""

    def norm(self, right: Tensor, grads: list[Tensor]) -> Tensor:
        mine = grads[self.inner.world.rank :: self.inner.world.size]
        return torch.stack([grad.norm() for grad in mine]).norm()


class NormAfterClipping(OtherNorm):
    def norm(self, right: Tensor, grads: list[Tensor]) -> Tensor:
        limit = self.plan.max_grad_norm
        return right if limit is None else right.clamp(max=limit)


class NoNormWithoutClipping(OtherNorm):
    def norm(self, right: Tensor, grads: list[Tensor]) -> Tensor:
        return torch.zeros(()) if self.plan.max_grad_norm is None else right


class NormOfTheScaledLoss(OtherNorm):
    def norm(self, right: Tensor, grads: list[Tensor]) -> Tensor:
        scale = self.inner.loss_scale
        return right if scale is None else torch.mul(right, scale.scale)


def never_clip(plan: Plan) -> Plan:
    return dataclasses.replace(plan, max_grad_norm=None)


class LimitsEachMicrobatch(WrappedEngine):
    """Clamps the elements that each backward adds, instead of the elements of the complete
    gradient.
    """

    def backward(self, loss: Tensor, weight: Tensor) -> None:
        self.inner.backward(loss, weight)
        if (limit := self.plan.max_grad_value) is not None:
            torch.nn.utils.clip_grad_value_(self.inner.parameters, limit)


class LimitsBeforeTheNorm(WrappedEngine):
    """Clamps elements first, and then clips the rest by the norm."""

    def update(self) -> Outcome:
        inner, limit = self.inner, self.plan.max_grad_value
        norm = stepping.global_norm(self.grads())
        if limit is not None:
            stepping.limit_values(self.grads(), limit)
        outcome: Outcome = inner.update()
        return dataclasses.replace(outcome, grad_norm=norm)


def never_limit(plan: Plan) -> Plan:
    return dataclasses.replace(plan, max_grad_value=None)


# --- law 3: steps that are not applied ---------------------------------------------------------


class OverflowApplied(WrappedEngine):
    """Applies every update, whatever the gradient is."""

    def update(self) -> Outcome:
        grads = [grad.clone() for grad in self.grads()]
        outcome: Outcome = self.inner.update()
        if not outcome.applied():
            trained = [p for p in self.inner.parameters if p.requires_grad]
            for parameter, grad in zip(trained, grads, strict=True):
                parameter.grad = grad
            self.inner.optimizer.step()
            self.inner.optimizer.zero_grad()
        return Outcome(outcome.grad_norm, lambda: True)


class OverflowHidden(WrappedEngine):
    """Replaces NaN by zero, and does not report it."""

    def update(self) -> Outcome:
        for grad in self.grads():
            grad.nan_to_num_(0.0, 0.0, 0.0)
        outcome: Outcome = self.inner.update()
        return outcome


class ClockTicksOnOverflow(WrappedEngine):
    """Keeps the weights on overflow, but counts the step in the optimizer."""

    def update(self) -> Outcome:
        outcome: Outcome = self.inner.update()
        if not outcome.applied():
            for state in self.inner.optimizer.state.values():
                state["step"] += 1
        return outcome


class LastAnswerForAll(WrappedEngine):
    """Returns from every `applied` the answer for the newest update."""

    newest: Outcome

    def update(self) -> Outcome:
        self.newest = self.inner.update()
        return Outcome(self.newest.grad_norm, self.answer)

    def answer(self) -> bool:
        return self.newest.applied()


# --- law 4: the learning rate, and gradients that stay -----------------------------------------


class RateOneUpdateLate(WrappedEngine):
    """Reads the learning rate when the previous update ends, so that it is one update late."""

    late: list[float] | None = None

    def update(self) -> Outcome:
        groups = self.inner.param_groups
        written = [group["lr"] for group in groups]
        for group, rate in zip(groups, self.late or written, strict=True):
            group["lr"] = rate
        outcome: Outcome = self.inner.update()
        self.late = written
        return outcome


class GradientStays(WrappedEngine):
    """Keeps the gradient after an update."""

    def update(self) -> Outcome:
        grads = [grad.clone() for grad in self.grads()]
        outcome: Outcome = self.inner.update()
        for parameter, grad in zip(self.inner.parameters, grads, strict=True):
            parameter.grad = grad
        return outcome


# --- law 5: evaluation -------------------------------------------------------------------------


class RandomStateNotPutBack(WrappedSession):
    """Draws the random numbers of an evaluation from the training's generators."""

    def set_rng_state(self, state: Mapping[str, Tensor]) -> None:
        pass


class EvaluationCounts(WrappedEngine):
    """Changes a buffer in evaluation, too."""

    def autocast(self) -> AbstractContextManager[Any]:
        if not self.inner.module.training and hasattr(self.inner.own, "num_forwards"):
            self.inner.own.num_forwards += 1
        context: AbstractContextManager[Any] = self.inner.autocast()
        return context


class PaddedWithDuplicates(WrappedSession):
    """Fills odd batches up with copies of the last sample, which then counts twice."""

    def feed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in self.inner.feed(batches):
            yield batch if torch.is_grad_enabled() else {k: pad(v) for k, v in batch.items()}


def pad(rows: Tensor) -> Tensor:
    return torch.cat((rows, rows[-1:])) if len(rows) % 2 else rows


class EverythingInMemory(WrappedSession):
    """Fetches all batches of an evaluation before the first is measured."""

    def feed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        fed: Iterator[Batch] = self.inner.feed(batches)
        return fed if torch.is_grad_enabled() else iter(list(fed))


class OwnPartFirst(WrappedSession):
    """Puts each rank's own rows before those of the others."""

    def gather(self, tensor: Tensor) -> Tensor:
        gathered: Tensor = self.inner.gather(tensor)
        if tensor.dim() < 2:
            return gathered
        sizes, rank = self.inner.exchange(len(tensor)), self.inner.world.rank
        first = sum(sizes[:rank])
        own = slice(first, first + sizes[rank])
        return torch.cat((gathered[own], gathered[:first], gathered[own.stop :]))


# --- law 6: saving and resuming ----------------------------------------------------------------


class MomentsDropped(WrappedEngine):
    """Starts with a new optimizer instead of the saved one."""

    def restore(self, reader: Reader) -> None:
        self.inner.restore(WeightsAlone(reader))


class MomentsInAnotherOrder(WrappedEngine):
    """Restores moments as contiguous tensors, whatever the memory layout of the weights is."""

    def restore(self, reader: Reader) -> None:
        self.inner.restore(reader)
        for state in self.inner.optimizer.state.values():
            for key, value in state.items():
                state[key] = value.contiguous()


class AveragesDropped(WrappedEngine):
    """Starts averages of weights over instead of restoring them."""

    def restore(self, reader: Reader) -> None:
        self.inner.restore(reader)
        self.inner.state.averages.of.clear()


class AveragesOfThePart(WrappedEngine):
    """Keeps averages of only those weights that this rank writes."""

    def average(self, weight: float) -> None:
        self.inner.average(weight)
        rank, averages = self.inner.world.rank, self.inner.state.averages.of
        for name in list(averages)[rank::2]:
            averages[name].copy_(self.inner.state.parameters[name])


class AveragesStayShown(WrappedEngine):
    """Leaves the averages in place of the weights after an evaluation."""

    def averaged(self) -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(self.inner.averaged())
        stack.pop_all()
        return stack


class ChangesOfACopy(WrappedEngine):
    """Passes copies of the frozen weights to `after_update`, so that changes to them are lost."""

    def change_weights(self, change: Callable[[Mapping[str, Any]], None]) -> None:
        learning = {name for name, p in self.inner.own.named_parameters() if p.requires_grad}

        def copied(parts: Mapping[str, Any]) -> None:
            change({n: (t if n in learning else t.clone(), k) for n, (t, k) in parts.items()})

        self.inner.change_weights(copied)


class ChangesOnOneRank(WrappedEngine):
    """Changes the weights on rank 0 alone."""

    def change_weights(self, change: Callable[[Mapping[str, Any]], None]) -> None:
        if self.inner.world.rank == 0:
            self.inner.change_weights(change)


class ChangesTwice(WrappedEngine):
    """Changes the weights again before they are saved."""

    def change_weights(self, change: Callable[[Mapping[str, Any]], None]) -> None:
        self.inner.change_weights(change)
        self.inner.change_weights(change)


class EachRankDraws(WrappedEngine):
    """Lets the optimizer draw from the rank's own generators, and compares no copies."""

    def __init__(self, inner: Any, plan: Plan) -> None:
        super().__init__(inner, plan)
        inner.draws.update = lambda optimizer: nullcontext()

    def audit(self) -> None:
        pass


class EachUpdateDrawsTheSame(WrappedEngine):
    """Seeds the generators of each update alike."""

    def number_update(self, number: int) -> None:
        self.inner.number_update(1)


class GroupsForgotten(WrappedEngine):
    """Leaves the counts that an optimizer keeps in its groups out of a save."""

    def shards(self) -> Iterator[Piece]:
        return (piece for piece in self.inner.shards() if "/group." not in piece.name)


class WeightsFirst(WrappedEngine):
    """Changes the weights before it is known whether the optimizer's state can be restored."""

    def restore(self, reader: Reader) -> None:
        with torch.no_grad():
            for name, parameter in self.inner.own.named_parameters():
                if name in reader.names("weights"):
                    parameter.copy_(reader.read("weights", name))
        self.inner.restore(reader)


class AnyState(WrappedEngine):
    """Restores whatever state there is, without checks."""

    def restore(self, reader: Reader) -> None:
        try:
            self.inner.restore(reader)
        except CheckpointError:
            self.inner.restore(WeightsAlone(reader))


class StateStays(WrappedEngine):
    """Keeps the optimizer's state when a checkpoint has none."""

    def restore(self, reader: Reader) -> None:
        kept = {parameter: dict(state) for parameter, state in self.inner.optimizer.state.items()}
        self.inner.restore(reader)
        if not reader.names("optimizer"):
            self.inner.optimizer.state.update(kept)


class MomentsRounded(WrappedEngine):
    """Rounds stored moments to bfloat16, to save space."""

    def shards(self) -> Iterator[Piece]:
        for piece in self.inner.shards():
            rounded = piece.tensor.bfloat16().to(piece.tensor.dtype)
            moment = piece.kind == "optimizer"
            yield dataclasses.replace(piece, tensor=rounded) if moment else piece


class OwnPartCounted(WrappedEngine):
    """Counts only the parameters of this rank's own part."""

    @property
    def num_parameters(self) -> int:
        return int(self.inner.num_parameters) // 2


class Untied(WrappedEngine):
    """Gives the head a weight of its own after restoring."""

    def restore(self, reader: Reader) -> None:
        self.inner.restore(reader)
        head = getattr(self.inner.own, "head", None)
        if head is not None:
            weight = nn.Parameter(head.weight.detach().clone())
            head._parameters["weight"] = weight  # hooks on registration do not see this


class BuffersForgotten(WrappedEngine):
    """Keeps the buffers that the model was built with, instead of the saved ones."""

    def restore(self, reader: Reader) -> None:
        kept = [(buffer, buffer.clone()) for buffer in self.inner.own.buffers()]
        self.inner.restore(reader)
        for buffer, value in kept:
            buffer.copy_(value)


class BuffersDrift(WrappedEngine):
    """Lets each rank keep its own buffers."""

    def __init__(self, inner: Any, plan: Plan) -> None:
        super().__init__(inner, plan)
        inner.module._forward_pre_hooks.clear()
        inner._entered = Entered(inner.module)  # which stays


class BuffersOfTheLastRank(WrappedEngine):
    """Saves buffers from the last rank, as if they were equal on all ranks like weights."""

    def shards(self) -> Iterator[Piece]:
        buffers, world = dict(self.inner.own.named_buffers()), self.inner.world
        yield from (piece for piece in self.inner.shards() if piece.name not in buffers)
        for name, buffer in buffers.items() if world.rank == world.size - 1 else ():
            yield Piece("weights", name, buffer, tuple(buffer.shape))


class MomentsInTheDtypeOfWeights(WrappedEngine):
    """Casts restored state to the dtype of its weight, as torch's `load_state_dict` does."""

    def restore(self, reader: Reader) -> None:
        self.inner.restore(reader)
        for parameter, state in self.inner.optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor) and key != "step":
                    state[key] = value.to(parameter.dtype)


class OfSomeNames(WeightsAlone):
    """A `Reader` that shows the state of some names only."""

    def __init__(self, reader: Reader, shown: Callable[[str], bool]) -> None:
        super().__init__(reader)
        self.shown = shown

    def names(self, kind: Kind) -> Any:
        return [n for n in self.reader.names(kind) if kind != "state" or self.shown(n)]


class ExtraStateNotSaved(WrappedEngine):
    """Saves parameters and buffers, and nothing else that modules have."""

    def shards(self) -> Iterator[Piece]:
        return (piece for piece in self.inner.shards() if not piece.name.startswith("extra"))


class ExtraStateForgotten(WrappedEngine):
    """Saves extra state, and restores none."""

    def restore(self, reader: Reader) -> None:
        self.inner.restore(OfSomeNames(reader, lambda name: not name.startswith("extra")))


class ExtraStateOfRank0(WrappedEngine):
    """Gives all ranks the extra state of rank 0."""

    def restore(self, reader: Reader) -> None:
        self.inner.restore(OfSomeNames(reader, lambda name: not name.startswith("extra.")))


class ExtraStateOfTheWrapper(WrappedEngine):
    """Saves extra state under the names of the wrapped module, and restores it by these."""

    def shards(self) -> Iterator[Piece]:
        for piece in self.inner.shards():
            name = piece.name.replace("extra/", "extra/module.", 1)
            yield dataclasses.replace(piece, name=name)


class OtherMomentum(WrappedEngine):
    """Uses the library's own batch normalization, which takes a larger share of each batch into its
    running statistics.
    """

    def __init__(self, inner: Any, plan: Plan) -> None:
        super().__init__(inner, plan)
        for part in inner.own.modules():
            if isinstance(part, nn.BatchNorm1d):
                part.momentum = 0.2


class FirstStepInAnotherOrder(WrappedEngine):
    """Lets the library rearrange its sums over ranks after its first step, by what it saw in that
    step.
    """

    def __init__(self, inner: Any, plan: Plan) -> None:
        super().__init__(inner, plan)
        del inner.module
        gc.collect()  # until then it keeps its hooks on the modules
        inner.module = DistributedDataParallel(inner.own, gradient_as_bucket_view=True)
        inner.module.missing_gradients = list
        inner._entered = Entered(inner.module)


class WrittenTwice(WrappedEngine):
    """Writes all weights on every rank."""

    def shards(self) -> Iterator[Piece]:
        for kind, tensors in (("weights", self.inner.own.named_parameters()),):
            for name, tensor in tensors:
                yield Piece(kind, name, tensor.detach(), tuple(tensor.shape))  # type: ignore[arg-type]


class ThreeTogether(BuffersDrift, WeightsFirst, DecaysWithoutAGradient):
    """Combines three faults, as a first driver might."""


# --- law 6: ranks that continue without one that died ------------------------------------------


class AppliesTheAbandonedStep(WrappedEngine):
    """Holds weights that the step without an update has changed."""

    def held(self) -> Iterator[Piece]:
        with torch.no_grad():
            for parameter in self.inner.parameters:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.1)
        return super().held()


class BuffersOfTheAbandonedStep(WrappedEngine):
    """Holds buffers that the forward of the abandoned step has changed."""

    def held(self) -> Iterator[Piece]:
        self.inner.begin_step()
        return super().held()


class HoldsNoMoments(WrappedEngine):
    """Holds weights alone."""

    def held(self) -> Iterator[Piece]:
        return (piece for piece in super().held() if piece.kind == "weights")


class SaysThatItHoldsAPart(WrappedEngine):
    """Holds all, and says that it holds a part."""

    def part(self) -> tuple[int, int]:
        return self.inner.world.rank, self.inner.world.size


class NeverLeaves(WrappedSession):
    """Still waits for the others when it has left them."""

    def leave(self) -> None:
        pass


class ShareCountedTwice(WrappedSession):
    """Gives all ranks the same samples once one has died."""

    @property
    def world(self) -> World:
        world: World = self.inner.world
        return dataclasses.replace(world, feeder_index=0) if lost_ranks.generation() else world


class WrapperOfMoreRanks(WrappedEngine):
    """Divides gradients by the number of ranks before one died, as a wrapper does that is kept."""

    def backward(self, loss: Tensor, weight: Tensor) -> None:
        size = self.inner.world.size
        self.inner.backward(loss, weight * size / (size + lost_ranks.generation()))


def has_joined() -> bool:
    """True on a spare that has taken the place of a dead rank."""
    return lost_ranks.own_number() in lost_ranks.joined()


class SpareKeepsItsWeights(WrappedEngine):
    """Restores nothing on a spare, whose weights are those of the beginning."""

    def restore(self, reader: Reader) -> None:
        if not has_joined():
            self.inner.restore(reader)


class SpareTakesTheFirstShare(WrappedSession):
    """Gives a spare the samples of rank 0."""

    @property
    def world(self) -> World:
        world: World = self.inner.world
        return dataclasses.replace(world, feeder_index=0) if has_joined() else world


class SpareDrawsAsRank0(WrappedSession):
    """Seeds a spare as rank 0 is seeded at the beginning."""

    def seed(self, value: int) -> None:
        self.inner.seed(self.plan.seed + 1 if has_joined() else value)


# --- law 7 and the session ---------------------------------------------------------------------


class FeedsAhead(WrappedSession):
    """Pulls a batch early, and does not declare it."""

    def feed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        fed = iter(self.inner.feed(batches))
        ahead = next(fed, None)
        while ahead is not None:
            current, ahead = ahead, next(fed, None)
            yield current


class RandomStateHalfTaken(WrappedSession):
    """Sets generators one after the other, and stops at the first one that fails."""

    def set_rng_state(self, state: Mapping[str, Tensor]) -> None:
        if "torch" in state and state["torch"].dtype == torch.uint8:
            torch.set_rng_state(state["torch"])
        self.inner.set_rng_state(state)


class RandomStateDropped(WrappedSession):
    """Ignores entries of the random state whose names it does not know."""

    def set_rng_state(self, state: Mapping[str, Tensor]) -> None:
        known = self.inner.rng_state()
        self.inner.set_rng_state({**known, **{k: v for k, v in state.items() if k in known}})


class OrderLost(WrappedSession):
    """A prefetching queue that gives the newest first."""

    def feed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        fed = iter(self.inner.feed(batches))
        for first in fed:
            second = next(fed, None)
            yield from (first,) if second is None else (second, first)


class PaddedGather(WrappedSession):
    """Fills shorter parts up with zeros, and leaves the zeros in the result."""

    def gather(self, tensor: Tensor) -> Tensor:
        longest = max(self.inner.exchange(len(tensor)))
        filler = tensor.new_zeros((longest - len(tensor), *tensor.shape[1:]))
        gathered: Tensor = self.inner.gather(torch.cat((tensor, filler)))
        return gathered


class BufferOfManyBlocks(WrappedSession):
    """Keeps a buffer for models with more blocks than a few."""

    def prepare(self, recipe: Recipe) -> WrappedEngine:
        made = super().prepare(recipe)
        blocks = getattr(recipe.model(), "blocks", ())
        self.kept = torch.zeros(1000) if len(blocks) > 5 else None
        return made


class HooksOfTheFirstBlock(WrappedSession):
    """Compiles each block by itself, and lets torch run what was compiled for the first block as
    it does by default, without looking at hooks.
    """

    def prepare(self, recipe: Recipe) -> WrappedEngine:
        made = super().prepare(recipe)
        if self.plan.compile:
            torch._dynamo.config.skip_nnmodule_hook_guards = True
            for block in made.inner.own.blocks if hasattr(made.inner.own, "blocks") else ():
                block.compile(**self.plan.compile_options)
        return made


def without_compiling(plan: Plan) -> Plan:
    return dataclasses.replace(plan, compile=False)


def without_recomputing(plan: Plan) -> Plan:
    return dataclasses.replace(plan, activation_checkpointing=())


def sharded(able: Capabilities) -> Capabilities:
    return dataclasses.replace(able, sharded=True)


def inexact(able: Capabilities) -> Capabilities:
    return dataclasses.replace(able, exact_resume=False)


def modest(able: Capabilities) -> Capabilities:
    return Capabilities(
        precisions=frozenset({"fp32"}),
        multi_process=True,
        sharded=False,
        compile=False,
        activation_checkpointing=False,
        feeds_ahead=False,
    )


class RefusesAll(WrappedSession):
    """Refuses every model as impossible to partition, so that no law is proved."""

    def prepare(self, recipe: Recipe) -> WrappedEngine:
        if self.takes(recipe):
            return super().prepare(recipe)
        raise RecipeError(self.words)

    words = "backend.fault is set, and the recipe says nothing that helps"

    def takes(self, recipe: Recipe) -> bool:
        return False


class RefusesWhatHasNoSequence(RefusesAll):
    """Refuses models without a sequence, as a driver that partitions sequences must."""

    def takes(self, recipe: Recipe) -> bool:
        return bool(recipe.parallel and recipe.parallel.sequence)


class RefusesWithoutAReason(RefusesWhatHasNoSequence):
    """Refuses a model without naming an option."""

    words = "this model is none that can be trained"


# --- law 7: late ranks --------------------------------------------------------------------------


class TwoByDefault(WrappedSession):
    """Waits for a second rank where no launcher gives the number of ranks."""

    @property
    def world(self) -> World:
        world: World = self.inner.world
        return world if "WORLD_SIZE" in os.environ else dataclasses.replace(world, size=2)


class NothingIsReported(WrappedSession):
    """Waits for late ranks without reporting them."""

    def watch(self, report: Callable[[int, float, str], None]) -> None:
        pass


class AllAreReported(WrappedSession):
    """Reports every rank as late."""

    def watch(self, report: Callable[[int, float, str], None]) -> None:
        def reported(rank: int, seconds: float, what: str) -> None:
            for each in range(self.inner.world.size):
                report(each, seconds, what)

        self.inner.watch(reported)


class TheOthersFault(WrappedSession):
    """Blames all other ranks for a failed call."""

    def tally(self, values: Sequence[float]) -> Callable[[], list[float]]:
        world = self.inner.world
        others = tuple(rank for rank in range(world.size) if rank != world.rank)
        try:
            sums = self.inner.tally(values)()
        except CollectiveFailed as error:
            raise CollectiveFailed(str(error), others) from error
        return lambda: list(sums)


class KeepsItToItself(WrappedSession):
    """Aborts a rank without a message to the other ranks, which keep waiting for it."""

    def abort(self, why: str, retry: bool = True) -> bool:
        return retry


def never_over(plan: Plan) -> Plan:
    return dataclasses.replace(plan, timeout_seconds=600.0)


OTHER_LAYERS = "1_absent-ranks_that_use_other_layers"
TURNS = "1_turns-each_update_trains_its_own_models"
SGD = "1_gradient-plain_sgd_equals_one_process"
NORM = "2_norm-norm_is_that_of_one_process"
LIMITED = "2_norm-clipping_limits_each_element"
BAD_RANK = "3_not_applied-one_bad_rank_spoils_the_update_of_none"
SAME_BITS = "5_evaluation-training_is_bitwise_the_same"
RESUMED = "6_resume-resumed_run_is_bit_exact-stops=2_7"
EXTRA = "6_extra_state-a_resumed_run_has_the_extra_state-stop=4"
BUFFERS = "6_buffers-each_forward_begins_with_those_of_rank_0-micro_batch=2"

HELD = "6_lost_ranks-what_ranks_hold_is_the_state"
DEATH = "6_lost_ranks-a_death_changes_no_number"
SPARE = "6_lost_ranks-a_spare_changes_no_number"

DAMAGED_RANDOM_STATE = "session-a_damaged_random_state"

THREE_TOGETHER = {
    "6_buffers-each_forward": "buffers that forward 1 begins with on rank 1",
    "6_resume-another_optimizer_is_refused": "and had changed weights or optimizer",
    "1_absent-what_has_no_gradient": "weights of what had no gradient on any rank",
}
"""The checks that must catch the three faults, each with a part of its message."""

NO_FAULTS: dict[str, Fault] = {
    "three together": Fault("", ThreeTogether, plan=finding_unused),
    "none": Fault(""),
    "modest": Fault("", capabilities=modest),
    "takes sequences": Fault("", session=RefusesWhatHasNoSequence),
}
FAULTS: dict[str, Fault] = {
    "two by default": Fault("7_capabilities-without_a_launcher", session=TwoByDefault),
    "nothing is reported": Fault("7_capabilities-stall_seconds", session=NothingIsReported),
    "all are reported": Fault("7_capabilities-stall_seconds", session=AllAreReported),
    "the others' fault": Fault("7_capabilities-timeout_seconds", session=TheOthersFault),
    "keeps it to itself": Fault("7_capabilities-one_rank_gives_up", session=KeepsItToItself),
    "never over": Fault("7_capabilities-timeout_seconds", plan=never_over),
    "buffer of many blocks": Fault("7_even_blocks", session=BufferOfManyBlocks),
    "copies drift": Fault("1_gradient-copies_stay_equal", CopiesDrift),
    "mean of local means": Fault(SGD + "-language", session=MeanOfLocalMeans),
    "sum over feeders": Fault(SGD, SumOverFeeders),
    "weight forgotten": Fault(SGD, WeightForgotten),
    "divided by accumulation": Fault(SGD, DividedByAccumulation),
    "accumulation of the plan": Fault("1_gradient-fit_equals", AccumulationOfThePlan),
    "never synchronised": Fault(SGD, NeverSynchronised),
    "one rate for all": Fault("1_groups-each_group", OneRateForAll),
    "matrices in parts": Fault("1_groups-a_matrix", MatricesInParts),
    "trains along": Fault(TURNS, TrainsAlong),
    "turns counted again": Fault(TURNS, session=TurnsCountedAgain),
    "decays without a gradient": Fault(
        "1_absent-what_has_no_gradient", DecaysWithoutAGradient, plan=finding_unused
    ),
    "moments of a decay": Fault(
        "1_absent-what_has_no_gradient", MomentsOfADecay, plan=finding_unused
    ),
    "mean of those that have one": Fault(
        "1_absent-what_has_none_on_some", MeanOfThoseThatHaveOne, plan=finding_unused
    ),
    "reports nothing": Fault(OTHER_LAYERS, plan=finding_unused, capabilities=even),
    "names nothing": Fault(OTHER_LAYERS, NamesNothing, plan=finding_unused, capabilities=even),
    "no autocast": Fault("1_gradient-low_precision_stays_near-bf16-SGD", NoAutocast),
    "scalars summed": Fault("1_gradient-a_parameter_of_no_dimension", ScalarsSummed),
    "one step a parameter": Fault("1_gradient-an_optimizer_takes_one_step", OneStepAParameter),
    "norm of the local shard": Fault(NORM, NormOfTheLocalShard),
    "norm after clipping": Fault(NORM, NormAfterClipping),
    "no norm without clipping": Fault(NORM, NoNormWithoutClipping),
    "norm of the scaled loss": Fault("2_norm-norm_is_unscaled-fp16", NormOfTheScaledLoss),
    "never clipped": Fault("2_norm-clipping_limits_the_update", plan=never_clip),
    "never limited": Fault(LIMITED, plan=never_limit),
    "limits each microbatch": Fault(LIMITED, LimitsEachMicrobatch),
    "limits before the norm": Fault(LIMITED, LimitsBeforeTheNorm),
    "overflow applied": Fault(BAD_RANK, OverflowApplied),
    "overflow hidden": Fault(BAD_RANK, OverflowHidden),
    "clock ticks on overflow": Fault(BAD_RANK, ClockTicksOnOverflow),
    "last answer for all": Fault(BAD_RANK, LastAnswerForAll),
    "rate one update late": Fault("4_learning_rate-each_update", RateOneUpdateLate),
    "gradient stays": Fault("4_learning_rate-no_gradient_is_left", GradientStays),
    "random state not put back": Fault(SAME_BITS, session=RandomStateNotPutBack),
    "evaluation counts": Fault(SAME_BITS, EvaluationCounts),
    "padded with duplicates": Fault("5_evaluation-metrics_are", session=PaddedWithDuplicates),
    "everything in memory": Fault("5_evaluation-memory", session=EverythingInMemory),
    "own part first": Fault("5_predictions-each_sample_once", session=OwnPartFirst),
    "moments dropped": Fault(RESUMED, MomentsDropped),
    "moments rounded": Fault(RESUMED, MomentsRounded),
    "moments in the dtype of weights": Fault(
        "6_resume-state_of_an_optimizer_keeps", MomentsInTheDtypeOfWeights
    ),
    "averages dropped": Fault("6_average", AveragesDropped),
    "averages of the part": Fault("6_average", AveragesOfThePart),
    "averages stay shown": Fault("6_average", AveragesStayShown),
    "moments in another order": Fault(RESUMED, MomentsInAnotherOrder),
    "changes of a copy": Fault("6_after_update", ChangesOfACopy),
    "changes on one rank": Fault("6_after_update", ChangesOnOneRank),
    "changes twice": Fault("6_after_update", ChangesTwice),
    "each rank draws": Fault("6_random_updates-copies_draw_alike", EachRankDraws),
    "each update draws the same": Fault(
        "6_random_updates-copies_draw_alike", EachUpdateDrawsTheSame
    ),
    "groups forgotten": Fault("6_resume-an_optimizer_that_counts", GroupsForgotten),
    "weights first": Fault("6_resume-another_optimizer_is_refused", WeightsFirst),
    "weights before damage": Fault("6_resume-a_damaged_optimizer_state", WeightsFirst),
    "any state": Fault("6_resume-another_optimizer_is_refused", AnyState),
    "state stays": Fault("6_resume-weights_alone", StateStays),
    "buffers forgotten": Fault(RESUMED, BuffersForgotten),
    "buffers drift": Fault(BUFFERS, BuffersDrift),
    "buffers of the last rank": Fault(BUFFERS, BuffersOfTheLastRank),
    "extra state not saved": Fault(EXTRA, ExtraStateNotSaved),
    "extra state forgotten": Fault(EXTRA, ExtraStateForgotten),
    "extra state of rank 0": Fault(EXTRA, ExtraStateOfRank0),
    "extra state of the wrapper": Fault("6_extra_state-extra_state_moves", ExtraStateOfTheWrapper),
    "other momentum": Fault("6_buffers-one_process_normalises", OtherMomentum),
    "first step in another order": Fault("6_resume-resumed_run_of_three", FirstStepInAnotherOrder),
    "untied": Fault("6_resume-tied_weights_stay_tied", Untied),
    "own part counted": Fault("6_resume-whole_weights", OwnPartCounted),
    "written twice": Fault("6_resume-whole_weights", WrittenTwice),
    "applies the abandoned step": Fault(HELD, AppliesTheAbandonedStep),
    "buffers of the abandoned step": Fault(HELD, BuffersOfTheAbandonedStep),
    "holds no moments": Fault(HELD, HoldsNoMoments),
    "says that it holds a part": Fault(HELD, SaysThatItHoldsAPart),
    "never leaves": Fault(HELD, session=NeverLeaves),
    "share counted twice": Fault(DEATH, session=ShareCountedTwice),
    "wrapper of more ranks": Fault(DEATH, WrapperOfMoreRanks),
    "a spare keeps its weights": Fault(SPARE, SpareKeepsItsWeights),
    "a spare takes the first share": Fault(SPARE, session=SpareTakesTheFirstShare),
    "a spare draws as rank 0": Fault(SPARE, session=SpareDrawsAsRank0),
    "exactness not declared": Fault(RESUMED, capabilities=inexact),
    "refuses all": Fault("1_gradient-experts_equal_one_process", session=RefusesAll),
    "refuses without a reason": Fault(SGD + "-regression", session=RefusesWithoutAReason),
    "feeds ahead": Fault("7_capabilities-feeds_ahead", session=FeedsAhead),
    "nothing recomputed": Fault(
        "7_capabilities-activation_checkpointing", plan=without_recomputing
    ),
    "hooks of the first block": Fault(
        "7_capabilities-compilation", session=HooksOfTheFirstBlock, plan=without_compiling
    ),
    "sharded in name": Fault("7_capabilities-sharded", capabilities=sharded),
    "random state half taken": Fault(DAMAGED_RANDOM_STATE, session=RandomStateHalfTaken),
    "random state dropped": Fault(DAMAGED_RANDOM_STATE, session=RandomStateDropped),
    "order lost": Fault("session-batches_are_fed_in_order", session=OrderLost),
    "padded gather": Fault("session-tensors_are_reduced_and_gathered", session=PaddedGather),
}
