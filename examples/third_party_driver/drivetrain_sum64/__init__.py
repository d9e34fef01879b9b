"""One process on the CPU that adds up the gradients of microbatches in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.backends.common import random_state
from drivetrain.backends.common.optimizer_state import OptimizerState
from drivetrain.kernel import contract
from drivetrain.kernel.errors import CheckpointMismatch, RecipeError


@dataclass(frozen=True)
class Sum64Options:
    """None: a driver without arguments of its own has an empty dataclass."""


class Sum64Driver:
    name = "sum64"
    options_type = Sum64Options

    def probe(self) -> contract.Probe:
        # preference: below the drivers that come with drivetrain, so that `auto` never takes it
        return contract.Probe(True, "float64 sums", devices=("cpu",), preference=-1)

    def capabilities(self, plan: contract.Plan) -> contract.Capabilities:
        return contract.Capabilities(
            precisions=frozenset({"fp32"}),
            multi_process=False,
            sharded=False,
            compile=False,  # what is not promised here is refused by the kernel, in words
            activation_checkpointing=False,
            feeds_ahead=False,
        )

    def layout(
        self,
        plan: contract.Plan,
        model: nn.Module,
        state_bytes: Mapping[str, int],
        world_size: int,
    ) -> contract.Layout:
        weights = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        return contract.Layout(weights, (8 + 4) * trained, sum(state_bytes.values()))

    @contextmanager
    def open(self, plan: contract.Plan) -> Iterator[Sum64Session]:
        yield Sum64Session(plan)


class Sum64Session:
    """Alone: a sum over all ranks is the value itself."""

    def __init__(self, plan: contract.Plan) -> None:
        self.plan = plan
        self.world = contract.World(0, 1, torch.device("cpu"), feeder_index=0, num_feeders=1)

    def prepare(self, recipe: contract.Recipe) -> Sum64Engine:
        return Sum64Engine(recipe, self.plan)

    def feed(self, batches: Iterator[contract.Batch]) -> Iterator[contract.Batch]:
        return batches

    def tally(self, values: Sequence[float]) -> Callable[[], list[float]]:
        return lambda: list(values)

    def exchange(self, value: Any) -> list[Any]:
        return [value]

    def reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        return tensor.clone()

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def seed(self, value: int) -> None:
        random_state.seed_all(value)

    def rng_state(self) -> dict[str, Tensor]:
        return random_state.rng_state(self.world.device)

    def set_rng_state(self, state: Mapping[str, Tensor]) -> None:
        random_state.set_rng_state(self.world.device, state)


class Sum64Engine:
    def __init__(self, recipe: contract.Recipe, plan: contract.Plan) -> None:
        torch.manual_seed(plan.seed)
        self.module = recipe.model()
        if not isinstance(self.module, nn.Module):
            raise RecipeError(f"recipe.model returned {type(self.module).__name__}, not a Module")
        assert recipe.optimizer is not None, "the kernel fills it in"
        self.optimizer = recipe.optimizer(list(self.module.named_parameters()))
        self.state = OptimizerState(self.optimizer, self.module)
        self.max_grad_norm = plan.max_grad_norm
        self.sums: dict[nn.Parameter, Tensor] = {}
        groups: dict[nn.Parameter, list[str]] = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            groups.setdefault(parameter, []).append(name)
        self.tied = tuple(tuple(names) for names in groups.values() if len(names) > 1)
        self.num_parameters = sum(parameter.numel() for parameter in groups)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def microbatch(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def autocast(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def backward(self, loss: Tensor, weight: Tensor) -> None:
        torch.autograd.backward(loss, weight)
        for parameter in self.module.parameters():
            if parameter.grad is not None:  # the one idea: take it away before the next is added
                grad, parameter.grad = parameter.grad.double(), None
                self.sums[parameter] = self.sums.get(parameter, 0.0) + grad

    def unused(self) -> list[str]:
        own = self.module.named_parameters()
        return [name for name, p in own if p.requires_grad and p not in self.sums]

    def update(self) -> contract.Outcome:
        norms = [torch.linalg.vector_norm(total) for total in self.sums.values()]
        norm = torch.stack(norms).norm().float() if norms else torch.zeros(())
        finite = bool(norm.isfinite())
        if finite:
            limit = float("inf") if self.max_grad_norm is None else self.max_grad_norm
            factor = min(1.0, limit / (float(norm) + 1e-6))
            for parameter, total in self.sums.items():
                parameter.grad = (total * factor).float()
            self.optimizer.step()
            for parameter in self.sums:
                parameter.grad = None
        self.sums.clear()
        return contract.Outcome(norm, lambda: finite)

    def weights(self) -> dict[str, Tensor]:
        """Each tied group once, and the buffers that a checkpoint should hold."""
        kept = self.module.state_dict()
        buffers = {name: b for name, b in self.module.named_buffers() if name in kept}
        tensors = {**dict(self.module.named_parameters()), **buffers}
        return {name: tensor.detach() for name, tensor in tensors.items()}

    def shards(self) -> Iterator[contract.Piece]:
        kinds: dict[contract.Kind, dict[str, Tensor]] = {
            "weights": self.weights(),
            "optimizer": self.state.tensors(),
        }
        for kind, tensors in kinds.items():
            for name, tensor in tensors.items():
                yield contract.Piece(kind, name, tensor, tuple(tensor.shape))

    def restore(self, reader: contract.Reader) -> None:
        weights = self.weights()
        there = {name: reader.info("weights", name).shape for name in reader.names("weights")}
        here = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        if differing := sorted({name for name, _ in there.items() ^ here.items()}):
            raise CheckpointMismatch(f"the checkpoint is of another model: {', '.join(differing)}")
        state = self.state.read(reader)  # raises for what is not this optimizer's
        read = {name: reader.read("weights", name) for name in weights}
        # all is read: from here on nothing can fail, and only now something changes
        self.state.load(state)
        with torch.no_grad():
            for name, tensor in weights.items():
                tensor.copy_(read[name])

    def full_params(self, names: Sequence[str] | None = None) -> AbstractContextManager[nn.Module]:
        return nullcontext(self.module)


driver: contract.Driver = Sum64Driver()
