"""Experts that are placed on different ranks, and tokens that travel to the ranks of their experts.

The method is that of GShard (https://arxiv.org/abs/2006.16668). A module of experts is called with
N tokens of size D, the K experts of each token, and the weights of their answers: (N, D), (N, K)
and (N, K). It returns (N, D), like the experts of transformers' mixtures. Dimension 0 of its
weights is the experts, of which a rank holds E / R. A rank computes only its own experts, on the
tokens of all ranks. Ranks that hold the same tokens, since they partition layers, send a part of
them each.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ...data.parallel import Parallel
from ...kernel.errors import RecipeError
from ..common import models
from ..fsdp import dtensor
from ..fsdp.engine import FsdpEngine
from ..fsdp.partition import Partition
from ..process_group.collectives import keep_for_a_while
from .layers import drop_weight
from .matching import largest_divisor, matching
from .shape import Mesh
from .stages import original_forward

__all__ = ["ExpertPartition", "plan_experts"]


class _Exchange(torch.autograd.Function):
    """All-to-all of rows: send `sent[i]` rows of each tensor to rank i, and receive `received[i]`
    from it. Backward goes the other way. One node exchanges all tensors, so that the order is the
    same on every rank.
    """

    @staticmethod
    def forward(
        ctx: Any, sent: Sequence[int], received: Sequence[int], group: Any, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.sizes = received, sent, group
        return tuple(_exchange(tensor, sent, received, group) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return (None, None, None, *(_exchange(each, *ctx.sizes) for each in gradients))


def _exchange(tensor: Tensor, sent: Sequence[int], received: Sequence[int], group: Any) -> Tensor:
    found = tensor.new_empty((sum(received), *tensor.shape[1:]))
    tensor = keep_for_a_while(tensor.contiguous())
    dist.all_to_all_single(keep_for_a_while(found), tensor, [*received], [*sent], group=group)
    return found


class _Split(torch.autograd.Function):
    """Keep this rank's rows of a tensor that is replicated in a group; backward gathers the
    gradients.
    """

    @staticmethod
    def forward(ctx: Any, rows: Sequence[int], group: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.sizes = rows, group
        return tuple(_own_rows(whole, rows, group) for whole in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return (None, None, *(_gather_rows(each, *ctx.sizes) for each in gradients))


class _Join(torch.autograd.Function):
    """Gather the rows of all ranks of a group; backward keeps this rank's rows of the gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Sequence[int], group: Any, part: Tensor) -> Tensor:
        ctx.sizes = rows, group
        return _gather_rows(part, rows, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, _own_rows(gradients[0], *ctx.sizes)


def _own_rows(whole: Tensor, rows: Sequence[int], group: Any) -> Tensor:
    rank = dist.get_rank(group)
    return whole.narrow(0, sum(rows[:rank]), rows[rank]).clone()


def _gather_rows(part: Tensor, rows: Sequence[int], group: Any) -> Tensor:
    return _exchange(part.repeat(len(rows), 1), [len(part)] * len(rows), rows, group)


class Experts:
    """One module of experts, whose forward it replaces. `mesh`: the ranks that the experts are
    placed on. `replicas`: the ranks that call the module with the same tokens; None: every rank has
    others.
    """

    def __init__(self, name: str, module: nn.Module, mesh: Any, replicas: Any) -> None:
        self.name, self.mesh, self.replicas = name, mesh, replicas
        self.module: Any = module
        self.num_experts = _num_experts(name, module)
        self.num_local = self.num_experts // mesh.size()
        self._forward, self._signature = module.forward, inspect.signature(module.forward)
        module.forward = torch.compiler.disable(self._dispatching_forward)  # type: ignore[no-untyped-call]

    def partition(self, absent: Set[nn.Parameter] = frozenset()) -> None:
        """Keep this rank's experts. No rank sends any, since all have built the same weights.
        Placeholders of `absent` weights stay without memory.
        """
        for owner, key, parameter in list(self._weights()):
            local = distribute_tensor(parameter.detach(), self.mesh, [Shard(0)], src_data_rank=None)
            owner.register_parameter(key, nn.Parameter(local, parameter.requires_grad))
            if parameter in absent:
                drop_weight(owner, key)

    def _weights(self) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
        for owner in self.module.modules():
            for key, parameter in owner._parameters.items():
                if parameter is not None:
                    yield owner, key, parameter

    @contextmanager
    def _local_weights(self) -> Iterator[None]:
        """Give the module this rank's experts alone within the block."""
        weights, has_number = list(self._weights()), "num_experts" in self.module.__dict__
        try:
            for owner, key, parameter in weights:
                owner._parameters[key] = cast(Any, parameter).to_local()
            if has_number:
                self.module.num_experts = self.num_local
            yield
        finally:
            for owner, key, parameter in weights:
                owner._parameters[key] = parameter
            if has_number:
                self.module.num_experts = self.num_experts

    def _dispatching_forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Forward that replaces the module's: (N, D), (N, K), (N, K) to (N, D)."""
        tokens, indices, weights = self._check_inputs(*args, **kwargs)
        if self.replicas is None:
            return self._dispatch(tokens, indices, weights)
        group, size = self.replicas.get_group(), self.replicas.size()
        rows = [len(part) for part in indices.tensor_split(size)]
        split, join = cast(Any, _Split.apply), cast(Any, _Join.apply)
        tokens, weights = split(rows, group, tokens, weights)
        outputs = self._dispatch(tokens, _own_rows(indices, rows, group), weights)
        return cast(Tensor, join(rows, group, outputs))

    def _dispatch(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """Send tokens, which no other rank holds, to the ranks of their experts, and return the
        answers.
        """
        group, size = self.mesh.get_group(), self.mesh.size()
        chosen = indices.flatten()
        order = chosen.argsort(stable=True)
        sources = order // indices.shape[-1]
        counts = chosen.new_zeros(self.num_experts).index_add_(0, chosen, torch.ones_like(chosen))
        incoming = torch.empty_like(counts)
        dist.all_to_all_single(keep_for_a_while(incoming), keep_for_a_while(counts), group=group)
        # the exchange needs its sizes on the host: the only place that waits for the device
        sent, received = torch.stack([counts, incoming]).view(2, size, -1).sum(-1).tolist()
        exchange = cast(Any, _Exchange.apply)
        rows, row_weights = exchange(
            sent, received, group, tokens[sources], weights.flatten()[order].unsqueeze(-1)
        )
        local = torch.arange(self.num_local, device=chosen.device).repeat(size)
        experts = local.repeat_interleave(incoming, output_size=len(rows)).unsqueeze(-1)
        outputs = self._compute(rows, experts, row_weights)
        found: Tensor = exchange(received, sent, group, outputs)[0]
        return found.new_zeros(len(tokens), *found.shape[1:]).index_add(0, sources, found)

    def _compute(self, rows: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """Compute with this rank's experts. Without tokens they compute a row of zeros, which is
        dropped: all ranks must have gradients, even if 0, and take part in each exchange of
        backward.
        """
        num_rows = len(rows)
        if not num_rows:
            rows, indices, weights = (
                torch.cat([each, each.new_zeros(1, each.shape[-1])])
                for each in (rows, indices, weights)
            )
        with self._local_weights():
            output: Tensor = self._forward(rows, indices, weights)
        return output[:num_rows]

    def _check_inputs(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        inputs = self._signature.bind(*args, **kwargs).args
        shapes = [tuple(getattr(each, "shape", ())) for each in inputs]
        if len(shapes) != 3 or not (
            len(shapes[0]) == len(shapes[1]) == 2
            and shapes[1] == shapes[2]
            and shapes[0][0] == shapes[1][0]
        ):
            seen = ", ".join(map(str, shapes))
            raise RecipeError(
                f"experts {self.name!r} were called with shapes {seen}. With backend.expert they "
                "must be given tokens (N, D), indices of the experts that each goes to (N, K), "
                "and weights of their answers (N, K); or set backend.expert=1"
            )
        return cast("tuple[Tensor, Tensor, Tensor]", inputs)


class ExpertPartition(Partition):
    """Places experts on the ranks of `mesh.expert`."""

    can_be_undone = False

    def __init__(self, parallel: Parallel, mesh: Mesh) -> None:
        self.parallel, self.mesh = parallel, mesh
        self.experts: Mapping[nn.Module, Experts] = {}

    def replace_forwards(self, module: nn.Module) -> None:
        """Replace the forward of each module of experts that the recipe names, so that
        recomputation sends tokens again. Raises like `plan_experts`, before anything is changed.
        """
        in_parts = "sequence" in self.parallel.tensor.values()
        replicas = None if in_parts or self.mesh.shape.tensor == 1 else self.mesh.tensor
        found = plan_experts(module, self.parallel, self.mesh.expert.size())
        self.experts = {
            part: Experts(name, part, self.mesh.expert, replicas) for name, part in found.items()
        }

    def choose_units(self, module: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
        inside = {part for experts in self.experts for part in experts.modules()}
        return [*self.experts, *(unit for unit in units if unit not in inside)]

    def to_compile(self, part: nn.Module) -> Sequence[nn.Module]:
        return () if part in self.experts else (part,)  # shapes depend on the number of tokens

    def partition_layers(self, engine: FsdpEngine) -> None:
        for experts in self.experts.values():
            experts.partition({*engine.elsewhere.values()})

    def sharding_of(self, unit: nn.Module) -> tuple[Any, Callable[..., Any]] | None:
        num_ranks = self.mesh.shape.num_expert_shards

        def choose(parameter: nn.Parameter) -> Shard:
            # the first dimension that divides, since there may be fewer experts than ranks
            sizes = parameter.to_local().shape if isinstance(parameter, DTensor) else ()
            return Shard(next((dim for dim, n in enumerate(sizes) if n % num_ranks == 0), 0))

        return (self.mesh.experts_sharded, choose) if unit in self.experts else None

    def attach(self, engine: FsdpEngine) -> None:
        self._parameters = [p for module in self.experts for p in module.parameters()]

    def complete_gradients(self) -> None:
        """Rescale the gradients of experts to means over feeders. They include the tokens of all
        ranks that share the experts, and were divided by the number of ranks that shard the same
        expert.
        """
        if grads := dtensor.own_gradients(self._parameters):
            shape = self.mesh.shape
            torch._foreach_mul_(grads, shape.num_expert_shards / shape.num_shards)

    @contextmanager
    def full_params(self, module: nn.Module) -> Iterator[None]:
        with ExitStack() as stack:
            for experts in self.experts:
                stack.enter_context(original_forward(experts, None))
            yield


def plan_experts(module: nn.Module, parallel: Parallel, size: int) -> dict[str, nn.Module]:
    """Return the modules of experts that the recipe names, by name; changes nothing. Raises
    `RecipeError` for a module that cannot be divided among `size` ranks.
    """
    if not parallel.experts:
        raise RecipeError(
            "backend.expert is more than 1, and the recipe does not say which modules hold "
            "experts: give it parallel=drivetrain.Parallel(experts=[PATTERN, ...]), or set "
            "backend.expert=1"
        )
    chosen = matching(module, "experts", parallel.experts)
    found = {name: module.get_submodule(name) for _, name in chosen}
    tied = {name for group in models.tied_groups(module) for name in group}
    for name, part in found.items():
        _check(name, part, size, found, tied)
    return found


def _num_experts(name: str, part: nn.Module) -> int:
    """Number of experts, which is the first size of each of the module's weights."""
    shapes = {key: tuple(parameter.shape) for key, parameter in part.named_parameters()}
    numbers = {shape[0] if shape else 0 for shape in shapes.values()}
    counted: Any = getattr(part, "num_experts", None)
    if isinstance(counted, int):
        numbers.add(counted)
    in_modules = any(isinstance(each, (nn.ModuleList, nn.ModuleDict)) for each in part.modules())
    if in_modules or len(numbers) != 1 or 0 in numbers:
        seen = ", ".join(f"{key} {shape}" for key, shape in shapes.items()) or "none"
        raise RecipeError(
            f"Parallel.experts names {name!r}, whose weights are {seen}: they must be stacked, in "
            "all of them one row of dimension 0 for each expert, not modules of their own"
        )
    return numbers.pop()


def _check(
    name: str, part: nn.Module, size: int, found: dict[str, nn.Module], tied: set[str]
) -> None:
    """Raise `RecipeError` for a module that cannot be divided among `size` ranks."""
    number = _num_experts(name, part)
    if number % size:
        largest = largest_divisor(number, size)
        raise RecipeError(
            f"backend.expert={size} does not divide the {number} experts of {name!r}; "
            f"backend.expert={largest} would do"
        )
    if outer := next((other for other in found if name.startswith(f"{other}.")), None):
        raise RecipeError(f"Parallel.experts names {name!r}, which is inside of {outer!r}")
    own = dict(part.named_parameters())
    if shared := sorted(tied & {f"{name}.{key}" for key in own}):
        raise RecipeError(
            f"Parallel.experts names {name!r}, whose {', '.join(shared)} is tied to another "
            "weight: experts that layers share cannot be partitioned"
        )
    if len(dtypes := {parameter.dtype for parameter in own.values()}) > 1:
        raise RecipeError(
            f"Parallel.experts names {name!r}, whose weights are of several dtypes "
            f"({', '.join(sorted(map(str, dtypes)))}): they are gathered together, in one"
        )
