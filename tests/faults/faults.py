"""The faults: one mistake each, as it is made in practice, and the check that must catch it."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from drivetrain.backends.common import models
from drivetrain.backends.ddp import DdpOptions
from drivetrain.conformance.resuming import WeightsAlone
from drivetrain.kernel.contract import Outcome, World
from drivetrain.kernel.errors import CheckpointError, CollectiveFailed, RecipeError
from drivetrain.kernel.plan import Capabilities, Plan
from drivetrain.kernel.recipe import Batch, Recipe
from drivetrain.kernel.shards import Piece, Reader


class Wrapped:
    """All of the inner object, but for what a fault replaces."""

    def __init__(self, inner: Any, plan: Plan) -> None:
        self.inner, self.plan = inner, plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class WrappedSession(Wrapped):
    """A session that wraps the engines it prepares."""

    build: type[WrappedEngine]

    def prepare(self, recipe: Recipe) -> WrappedEngine:
        return self.build(self.inner.prepare(recipe), self.plan)


class WrappedEngine(Wrapped):
    """An engine, with what faults want of it."""

    def grads(self) -> list[Tensor]:
        return [p.grad for p in self.inner.parameters if p.grad is not None]

    def average(self, weight: float) -> None:  # named here: a contract is not seen through getattr
        self.inner.average(weight)

    def averaged(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self.inner.averaged()
        return context


T = TypeVar("T")


def unchanged(value: T) -> T:
    return value


@dataclass(frozen=True)
class Fault:
    """What is replaced, and `caught_by`: the check that must see it (part of a case's name)."""

    caught_by: str
    engine: type[WrappedEngine] = WrappedEngine
    session: type[WrappedSession] = WrappedSession
    plan: Callable[[Plan], Plan] = unchanged
    capabilities: Callable[[Capabilities], Capabilities] = unchanged


# --- law 1: the gradient -----------------------------------------------------------------------


class CopiesDrift(WrappedEngine):
    """The last rank rounds otherwise."""

    def update(self) -> Outcome:
        outcome: Outcome = self.inner.update()
        if self.inner.world.rank == self.inner.world.size - 1:
            for parameter in self.inner.parameters:
                parameter.data = torch.nextafter(parameter.data, torch.tensor(math.inf))
        return outcome


class MeanOfLocalMeans(WrappedSession):
    """Each feeder divides by its own items."""

    def tally(self, values: Sequence[float]) -> Callable[[], list[float]]:
        wait = self.inner.tally(values)
        return lambda: [values[0] * self.inner.world.num_feeders, *wait()[1:]]


class SumOverFeeders(WrappedEngine):
    """The gradient is summed over feeders where it should be averaged."""

    def backward(self, loss: Tensor, weight: Tensor) -> None:
        self.inner.backward(loss, weight * self.inner.world.num_feeders)


class WeightForgotten(WrappedEngine):
    """Every loss counts as one, whatever it should weigh."""

    def backward(self, loss: Tensor, weight: Tensor) -> None:
        self.inner.backward(loss, torch.ones_like(weight))


class DividedByAccumulation(WrappedEngine):
    """The mean over microbatches, not their sum."""

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


class NeverSynchronised(WrappedEngine):
    """The last microbatch of several is taken for one of the others."""

    first = True

    def microbatch(self, last: bool) -> AbstractContextManager[Any]:
        alone, self.first = self.first and last, last
        context: AbstractContextManager[Any] = self.inner.microbatch(alone)
        return context


class NoAutocast(WrappedEngine):
    """bf16 is promised, and everything runs in float32."""

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", enabled=False)


class ScalarsSummed(WrappedEngine):
    """What is carried beside the model is summed over feeders where it should be averaged."""

    def update(self) -> Outcome:
        for grad in self.grads():
            if not grad.dim():
                grad.mul_(self.inner.world.num_feeders)
        outcome: Outcome = self.inner.update()
        return outcome


class OneStepAParameter(WrappedEngine):
    """The optimizer is called once for each tensor, whatever it counts or adds up."""

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
    """The rate of the first group is that of all."""

    def update(self) -> Outcome:
        first, *others = self.inner.param_groups
        for group in others:
            group["lr"] = first["lr"]
        outcome: Outcome = self.inner.update()
        return outcome


class TrainsAlong(WrappedEngine):
    """What a turn holds as a constant learns, too."""

    def __init__(self, inner: Any, plan: Plan) -> None:
        super().__init__(inner, plan)
        inner.module.register_forward_pre_hook(self.let_all_learn)

    def let_all_learn(self, module: nn.Module, args: Any) -> None:
        module.requires_grad_(True)


class TurnsCountedAnew(WrappedSession):
    """Whose turn it is follows from the updates of this process, also in a run that is resumed."""

    def prepare(self, recipe: Recipe) -> WrappedEngine:
        loss: Any = recipe.loss
        if of_update := getattr(loss, "of_update", None):
            counted = itertools.count(1)
            loss.of_update = lambda number: of_update(next(counted))
        return super().prepare(recipe)


class MatricesInParts(WrappedEngine):
    """Each half of a matrix is updated as a matrix of its own."""

    def __init__(self, inner: Any, plan: Plan) -> None:
        super().__init__(inner, plan)
        self.halves: dict[Tensor, list[nn.Parameter]] = {}

    def update(self) -> Outcome:
        groups = [g for g in self.inner.param_groups if "ns_steps" in g]
        whole = [(group, group["params"]) for group in groups]
        for group, parameters in whole:
            group["params"] = [half for p in parameters for half in self.cut(p)]
        outcome: Outcome = self.inner.update()
        for group, parameters in whole:
            group["params"] = parameters
        return outcome

    def cut(self, parameter: Tensor) -> list[nn.Parameter]:
        made = [nn.Parameter(part) for part in parameter.detach().chunk(2)]
        halves = self.halves.setdefault(parameter, made)
        assert parameter.grad is not None
        for half, grad in zip(halves, parameter.grad.chunk(2), strict=True):
            half.grad = grad
        return halves


class DecaysWithoutAGradient(WrappedEngine):
    """A parameter that no rank has a gradient of is given one of zero."""

    def update(self) -> Outcome:
        for parameter in self.inner.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        outcome: Outcome = self.inner.update()
        return outcome


class MeanOfThoseThatHaveOne(WrappedEngine):
    """Ranks without a gradient of a parameter are left out of its mean."""

    def update(self) -> Outcome:
        for name, parameter in self.inner.own.named_parameters():
            if name.startswith("spare.") and parameter.grad is not None:
                parameter.grad.mul_(self.inner.world.size)
        outcome: Outcome = self.inner.update()
        return outcome


class NamesNothing(WrappedEngine):
    """Ranks that use different layers end by whatever the library says."""

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
    """Reports another norm."""

    def update(self) -> Outcome:
        grads = [grad.clone() for grad in self.grads()]
        outcome: Outcome = self.inner.update()
        return dataclasses.replace(outcome, grad_norm=self.norm(outcome.grad_norm, grads))

    def norm(self, right: Tensor, grads: list[Tensor]) -> Tensor:
        raise NotImplementedError


class NormOfTheLocalShard(OtherNorm):
    """Each rank over its own part of the parameters."""

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


# --- law 3: steps that are not applied ---------------------------------------------------------


class OverflowApplied(WrappedEngine):
    """Steps whatever the gradient is."""

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
    """NaN becomes zero, and nobody hears of it."""

    def update(self) -> Outcome:
        for grad in self.grads():
            grad.nan_to_num_(0.0, 0.0, 0.0)
        outcome: Outcome = self.inner.update()
        return outcome


class ClockTicksOnOverflow(WrappedEngine):
    """The weights are kept, the step count of the optimizer is not."""

    def update(self) -> Outcome:
        outcome: Outcome = self.inner.update()
        if not outcome.applied():
            for state in self.inner.optimizer.state.values():
                state["step"] += 1
        return outcome


class LastAnswerForAll(WrappedEngine):
    """`applied` answers for the newest update, whichever was asked about."""

    newest: Outcome

    def update(self) -> Outcome:
        self.newest = self.inner.update()
        return Outcome(self.newest.grad_norm, self.answer)

    def answer(self) -> bool:
        return self.newest.applied()


# --- law 4: the learning rate, and gradients that stay -----------------------------------------


class RateOneUpdateLate(WrappedEngine):
    """The optimizer took its copy of the rate when the last update ended."""

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
    """Nobody cleared it."""

    def update(self) -> Outcome:
        grads = [grad.clone() for grad in self.grads()]
        outcome: Outcome = self.inner.update()
        for parameter, grad in zip(self.inner.parameters, grads, strict=True):
            parameter.grad = grad
        return outcome


# --- law 5: evaluation -------------------------------------------------------------------------


class RandomStateNotPutBack(WrappedSession):
    """Evaluation's random numbers are taken from training's."""

    def set_rng_state(self, state: Mapping[str, Tensor]) -> None:
        pass


class EvaluationCounts(WrappedEngine):
    """A buffer moves in evaluation as well."""

    def autocast(self) -> AbstractContextManager[Any]:
        if not self.inner.module.training and hasattr(self.inner.own, "num_forwards"):
            self.inner.own.num_forwards += 1
        context: AbstractContextManager[Any] = self.inner.autocast()
        return context


class PaddedWithDuplicates(WrappedSession):
    """Odd batches are filled up with their last sample, which is then counted twice."""

    def feed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in self.inner.feed(batches):
            yield batch if torch.is_grad_enabled() else {k: pad(v) for k, v in batch.items()}


def pad(rows: Tensor) -> Tensor:
    return torch.cat((rows, rows[-1:])) if len(rows) % 2 else rows


class EverythingInMemory(WrappedSession):
    """All batches are fetched before the first is measured."""

    def feed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        fed: Iterator[Batch] = self.inner.feed(batches)
        return fed if torch.is_grad_enabled() else iter(list(fed))


class OwnPartFirst(WrappedSession):
    """Each rank puts its own rows before those of the others."""

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
    """The optimizer starts afresh."""

    def restore(self, reader: Reader) -> None:
        self.inner.restore(WeightsAlone(reader))


class AveragesDropped(WrappedEngine):
    """Averages of weights start afresh."""

    def restore(self, reader: Reader) -> None:
        self.inner.restore(reader)
        self.inner.state.averages.of.clear()


class AveragesOfThePart(WrappedEngine):
    """Each rank keeps averages of what it writes, and knows no others."""

    def average(self, weight: float) -> None:
        self.inner.average(weight)
        rank, averages = self.inner.world.rank, self.inner.state.averages.of
        for name in list(averages)[rank::2]:
            averages[name].copy_(self.inner.state.parameters[name])


class AveragesStayShown(WrappedEngine):
    """After an evaluation of the averages they are the weights."""

    def averaged(self) -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(self.inner.averaged())
        stack.pop_all()
        return stack


class GroupsForgotten(WrappedEngine):
    """What an optimizer counts in its groups is not saved."""

    def shards(self) -> Iterator[Piece]:
        return (piece for piece in self.inner.shards() if "/group." not in piece.name)


class WeightsFirst(WrappedEngine):
    """Weights are taken before it is known whether the optimizer's state can be."""

    def restore(self, reader: Reader) -> None:
        with torch.no_grad():
            for name, parameter in self.inner.own.named_parameters():
                if name in reader.names("weights"):
                    parameter.copy_(reader.read("weights", name))
        self.inner.restore(reader)


class AnyState(WrappedEngine):
    """An optimizer is given whatever state there is."""

    def restore(self, reader: Reader) -> None:
        try:
            self.inner.restore(reader)
        except CheckpointError:
            self.inner.restore(WeightsAlone(reader))


class StateStays(WrappedEngine):
    """Without stored state an optimizer keeps what it had."""

    def restore(self, reader: Reader) -> None:
        kept = {parameter: dict(state) for parameter, state in self.inner.optimizer.state.items()}
        self.inner.restore(reader)
        if not reader.names("optimizer"):
            self.inner.optimizer.state.update(kept)


class MomentsRounded(WrappedEngine):
    """To save space they are stored in bfloat16."""

    def shards(self) -> Iterator[Piece]:
        for piece in self.inner.shards():
            rounded = piece.tensor.bfloat16().to(piece.tensor.dtype)
            moment = piece.kind == "optimizer"
            yield dataclasses.replace(piece, tensor=rounded) if moment else piece


class OwnPartCounted(WrappedEngine):
    """The number of parameters is that of the rank's own part."""

    @property
    def num_parameters(self) -> int:
        return int(self.inner.num_parameters) // 2


class Untied(WrappedEngine):
    """After restoring, the head has a weight of its own."""

    def restore(self, reader: Reader) -> None:
        self.inner.restore(reader)
        head = getattr(self.inner.own, "head", None)
        if head is not None:
            head.weight = nn.Parameter(head.weight.detach().clone())


class BuffersForgotten(WrappedEngine):
    """Buffers keep what they were built with."""

    def restore(self, reader: Reader) -> None:
        kept = [(buffer, buffer.clone()) for buffer in self.inner.own.buffers()]
        self.inner.restore(reader)
        for buffer, value in kept:
            buffer.copy_(value)


class BuffersDrift(WrappedEngine):
    """Each rank goes on with its own."""

    def __init__(self, inner: Any, plan: Plan) -> None:
        super().__init__(inner, plan)
        inner.module._forward_pre_hooks.clear()


class BuffersOfTheLastRank(WrappedEngine):
    """Dealt over ranks as weights are, which are equal."""

    def shards(self) -> Iterator[Piece]:
        buffers, world = dict(self.inner.own.named_buffers()), self.inner.world
        yield from (piece for piece in self.inner.shards() if piece.name not in buffers)
        for name, buffer in buffers.items() if world.rank == world.size - 1 else ():
            yield Piece("weights", name, buffer, tuple(buffer.shape))


class OtherMomentum(WrappedEngine):
    """A library's own layer, which takes more of each batch into its running statistics."""

    def __init__(self, inner: Any, plan: Plan) -> None:
        super().__init__(inner, plan)
        for part in inner.own.modules():
            if isinstance(part, nn.BatchNorm1d):
                part.momentum = 0.2


class FirstStepInAnotherOrder(WrappedEngine):
    """The library arranges what ranks add up anew, by what it saw in its first step."""

    def __init__(self, inner: Any, plan: Plan) -> None:
        super().__init__(inner, plan)
        del inner.module
        gc.collect()  # it leaves its hooks behind until then
        inner.module = DistributedDataParallel(inner.own, gradient_as_bucket_view=True)
        inner.module.waited_for = list


class WrittenTwice(WrappedEngine):
    """Every rank writes everything."""

    def shards(self) -> Iterator[Piece]:
        for kind, tensors in (("weights", self.inner.own.named_parameters()),):
            for name, tensor in tensors:
                yield Piece(kind, name, tensor.detach(), tuple(tensor.shape))  # type: ignore[arg-type]


class ThreeTogether(BuffersDrift, WeightsFirst, DecaysWithoutAGradient):
    """As somebody's first driver had them."""


# --- law 7 and the session ---------------------------------------------------------------------


class FeedsAhead(WrappedSession):
    """Pulls a batch early, and does not say so."""

    def feed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        fed = iter(self.inner.feed(batches))
        ahead = next(fed, None)
        while ahead is not None:
            current, ahead = ahead, next(fed, None)
            yield current


class RandomStateHalfTaken(WrappedSession):
    """Generators are set one after the other, until one cannot be."""

    def set_rng_state(self, state: Mapping[str, Tensor]) -> None:
        if "torch" in state and state["torch"].dtype == torch.uint8:
            torch.set_rng_state(state["torch"])
        self.inner.set_rng_state(state)


class RandomStateDropped(WrappedSession):
    """What is not known by name is left out without a word."""

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
    """Shorter parts are filled up with zeros, which stay."""

    def gather(self, tensor: Tensor) -> Tensor:
        longest = max(self.inner.exchange(len(tensor)))
        filler = tensor.new_zeros((longest - len(tensor), *tensor.shape[1:]))
        gathered: Tensor = self.inner.gather(torch.cat((tensor, filler)))
        return gathered


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
    """Every model is one that cannot be cut, so that nothing is left to be proved."""

    def prepare(self, recipe: Recipe) -> WrappedEngine:
        if self.takes(recipe):
            return super().prepare(recipe)
        raise RecipeError(self.words)

    words = "backend.fault is set, and the recipe says nothing that helps"

    def takes(self, recipe: Recipe) -> bool:
        return False


class RefusesWhatHasNoSequence(RefusesAll):
    """As a driver that cuts sequences must."""

    def takes(self, recipe: Recipe) -> bool:
        return bool(recipe.parallel and recipe.parallel.sequence)


class RefusesWithoutAReason(RefusesWhatHasNoSequence):
    """By words that name no option."""

    words = "this model is none that can be trained"


# --- law 7: late ranks --------------------------------------------------------------------------


class TwoByDefault(WrappedSession):
    """Where no launcher says how many ranks there are, another is waited for."""

    @property
    def world(self) -> World:
        world: World = self.inner.world
        return world if "WORLD_SIZE" in os.environ else dataclasses.replace(world, size=2)


class NobodyIsTold(WrappedSession):
    """Late ranks are waited for without a word."""

    def watch(self, tell: Callable[[int, float, str], None]) -> None:
        pass


class AllAreTold(WrappedSession):
    """Whoever waits is told of as the one that is late."""

    def watch(self, tell: Callable[[int, float, str], None]) -> None:
        def told(rank: int, seconds: float, what: str) -> None:
            for each in range(self.inner.world.size):
                tell(each, seconds, what)

        self.inner.watch(told)


class TheOthersFault(WrappedSession):
    """A rank whose call fails names whoever it is not."""

    def tally(self, values: Sequence[float]) -> Callable[[], list[float]]:
        world = self.inner.world
        others = tuple(rank for rank in range(world.size) if rank != world.rank)
        try:
            sums = self.inner.tally(values)()
        except CollectiveFailed as error:
            raise CollectiveFailed(str(error), others) from error
        return lambda: list(sums)


class KeepsItToItself(WrappedSession):
    """A rank gives up without a word to the others, which wait for it."""

    def give_up(self, why: str, retry: bool = True) -> bool:
        return retry


def never_over(plan: Plan) -> Plan:
    return dataclasses.replace(plan, timeout_seconds=600.0)


OTHER_LAYERS = "1_absent-ranks_that_use_other_layers"
TURNS = "1_turns-each_update_trains_its_own_models"
SGD = "1_gradient-plain_sgd_equals_one_process"
NORM = "2_norm-norm_is_that_of_one_process"
BAD_RANK = "3_not_applied-one_bad_rank_spoils_the_update_of_none"
SAME_BITS = "5_evaluation-training_is_bitwise_the_same"
RESUMED = "6_resume-resumed_run_is_bit_exact-stops=2_7"
BUFFERS = "6_buffers-each_forward_begins_with_those_of_rank_0-micro_batch=2"

DAMAGED_RANDOM_STATE = "session-a_damaged_random_state"

THREE_TOGETHER = {
    "6_buffers-each_forward": "buffers that forward 1 begins with on rank 1",
    "6_resume-another_optimizer_is_refused": "and had changed weights or optimizer",
    "1_absent-what_has_no_gradient": "weights of what had no gradient on any rank",
}
"""The checks that must see them, and what each says."""

NO_FAULTS: dict[str, Fault] = {
    "three together": Fault("", ThreeTogether, plan=finding_unused),
    "none": Fault(""),
    "modest": Fault("", capabilities=modest),
    "takes sequences": Fault("", session=RefusesWhatHasNoSequence),
}
FAULTS: dict[str, Fault] = {
    "two by default": Fault("7_capabilities-without_a_launcher", session=TwoByDefault),
    "nobody is told": Fault("7_capabilities-stall_seconds", session=NobodyIsTold),
    "all are told": Fault("7_capabilities-stall_seconds", session=AllAreTold),
    "the others' fault": Fault("7_capabilities-timeout_seconds", session=TheOthersFault),
    "keeps it to itself": Fault("7_capabilities-one_rank_gives_up", session=KeepsItToItself),
    "never over": Fault("7_capabilities-timeout_seconds", plan=never_over),
    "copies drift": Fault("1_gradient-copies_stay_equal", CopiesDrift),
    "mean of local means": Fault(SGD + "-language", session=MeanOfLocalMeans),
    "sum over feeders": Fault(SGD, SumOverFeeders),
    "weight forgotten": Fault(SGD, WeightForgotten),
    "divided by accumulation": Fault(SGD, DividedByAccumulation),
    "never synchronised": Fault(SGD, NeverSynchronised),
    "one rate for all": Fault("1_groups-each_group", OneRateForAll),
    "matrices in parts": Fault("1_groups-a_matrix", MatricesInParts),
    "trains along": Fault(TURNS, TrainsAlong),
    "turns counted anew": Fault(TURNS, session=TurnsCountedAnew),
    "decays without a gradient": Fault(
        "1_absent-what_has_no_gradient", DecaysWithoutAGradient, plan=finding_unused
    ),
    "mean of those that have one": Fault(
        "1_absent-what_has_none_on_some", MeanOfThoseThatHaveOne, plan=finding_unused
    ),
    "tells nobody": Fault(OTHER_LAYERS, plan=finding_unused, capabilities=even),
    "names nothing": Fault(OTHER_LAYERS, NamesNothing, plan=finding_unused, capabilities=even),
    "no autocast": Fault("1_gradient-low_precision_stays_near-bf16-SGD", NoAutocast),
    "scalars summed": Fault("1_gradient-a_parameter_of_no_dimension", ScalarsSummed),
    "one step a parameter": Fault("1_gradient-an_optimizer_takes_one_step", OneStepAParameter),
    "norm of the local shard": Fault(NORM, NormOfTheLocalShard),
    "norm after clipping": Fault(NORM, NormAfterClipping),
    "no norm without clipping": Fault(NORM, NoNormWithoutClipping),
    "norm of the scaled loss": Fault("2_norm-norm_is_unscaled-fp16", NormOfTheScaledLoss),
    "never clipped": Fault("2_norm-clipping_limits_the_update", plan=never_clip),
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
    "averages dropped": Fault("6_average", AveragesDropped),
    "averages of the part": Fault("6_average", AveragesOfThePart),
    "averages stay shown": Fault("6_average", AveragesStayShown),
    "groups forgotten": Fault("6_resume-an_optimizer_that_counts", GroupsForgotten),
    "weights first": Fault("6_resume-another_optimizer_is_refused", WeightsFirst),
    "weights before damage": Fault("6_resume-a_damaged_optimizer_state", WeightsFirst),
    "any state": Fault("6_resume-another_optimizer_is_refused", AnyState),
    "state stays": Fault("6_resume-weights_alone", StateStays),
    "buffers forgotten": Fault(RESUMED, BuffersForgotten),
    "buffers drift": Fault(BUFFERS, BuffersDrift),
    "buffers of the last rank": Fault(BUFFERS, BuffersOfTheLastRank),
    "other momentum": Fault("6_buffers-one_process_normalises", OtherMomentum),
    "first step in another order": Fault("6_resume-resumed_run_of_three", FirstStepInAnotherOrder),
    "untied": Fault("6_resume-tied_weights_stay_tied", Untied),
    "own part counted": Fault("6_resume-whole_weights", OwnPartCounted),
    "written twice": Fault("6_resume-whole_weights", WrittenTwice),
    "exactness not declared": Fault(RESUMED, capabilities=inexact),
    "refuses all": Fault("1_gradient-experts_equal_one_process", session=RefusesAll),
    "refuses without a reason": Fault(SGD + "-regression", session=RefusesWithoutAReason),
    "feeds ahead": Fault("7_capabilities-feeds_ahead", session=FeedsAhead),
    "nothing recomputed": Fault(
        "7_capabilities-activation_checkpointing", plan=without_recomputing
    ),
    "sharded in name": Fault("7_capabilities-sharded", capabilities=sharded),
    "random state half taken": Fault(DAMAGED_RANDOM_STATE, session=RandomStateHalfTaken),
    "random state dropped": Fault(DAMAGED_RANDOM_STATE, session=RandomStateDropped),
    "order lost": Fault("session-batches_are_fed_in_order", session=OrderLost),
    "padded gather": Fault("session-tensors_are_reduced_and_gathered", session=PaddedGather),
}
