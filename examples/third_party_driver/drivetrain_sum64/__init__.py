"""One process on the CPU that adds up the gradients of microbatches in float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from drivetrain.backends.common import stepping
from drivetrain.backends.common.plain_engine import PlainEngine
from drivetrain.backends.common.single_process import HostSession
from drivetrain.kernel.contract import Driver, Outcome, World
from drivetrain.kernel.plan import Capabilities, Plan, Probe
from drivetrain.kernel.recipe import Recipe


@dataclass(frozen=True)
class Sum64Options:
    """Options of the driver, which has none. A driver without options needs an empty dataclass."""


class Sum64Driver:
    name = "sum64"
    options_type = Sum64Options

    def probe(self) -> Probe:
        # preference: below the drivers that come with drivetrain, so that `auto` never takes it
        return Probe(True, "float64 sums", devices=("cpu",), preference=-1)

    def capabilities(self, plan: Plan) -> Capabilities:
        return Capabilities(
            precisions=frozenset({"fp32"}),
            multi_process=False,
            sharded=False,
            compile=False,  # what is not promised here is refused by the kernel, in words
            activation_checkpointing=False,
            feeds_ahead=False,
        )

    @contextmanager
    def open(self, plan: Plan) -> Iterator[HostSession]:
        yield HostSession(plan, Sum64Engine)


class Sum64Engine(PlainEngine):
    """Trains like plain PyTorch, but keeps the sums of gradients in float64 until the update."""

    def __init__(self, recipe: Recipe, plan: Plan, world: World) -> None:
        super().__init__(recipe, plan, world)
        self.sums: dict[nn.Parameter, Tensor] = {}

    def backward(self, loss: Tensor, weight: Tensor) -> None:
        super().backward(loss, weight)
        for parameter in self.parameters:
            if parameter.grad is not None:  # the one idea: take it away before the next is added
                grad, parameter.grad = parameter.grad.double(), None
                self.sums[parameter] = self.sums.get(parameter, 0.0) + grad

    def unused(self) -> list[str]:
        own = self.module.named_parameters()
        return [name for name, p in own if p.requires_grad and p not in self.sums]

    def update(self) -> Outcome:
        norm = stepping.global_norm(list(self.sums.values()))
        for parameter, total in self.sums.items():
            parameter.grad = total.to(parameter.dtype)  # rounded once
        self.sums.clear()
        grads = [p.grad for p in self.parameters if p.grad is not None]
        with self.draws.update(self.optimizer):  # what it draws depends on the update's number
            outcome = stepping.step_if_finite(self.optimizer, grads, norm, self.plan.max_grad_norm)
        stepping.forget_gradients(self.parameters)
        return outcome


driver: Driver = Sum64Driver()
