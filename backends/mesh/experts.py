"""Experts that are dealt over ranks, and tokens that travel to those that hold theirs.

As in GShard (https://arxiv.org/abs/2006.16668). A module of experts is called with N tokens of
size D, the K experts that each goes to, and what each of their answers weighs: (N, D), (N, K) and
(N, K), and returns (N, D), as those of transformers' mixtures are. Of its weights dimension 0 is
the experts, of which a rank has E / R. It computes nothing but its own, on the tokens of all ranks.
Ranks that have the same tokens, since they cut layers, send a part of them each.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ...data.parallel import Parallel
from ...kernel.errors import RecipeError
from ..common import models
from ..process_group.collectives import keep_for_a_while
from .layers import let_go
from .matching import largest_divisor, matching

__all__ = ["Experts", "find_experts", "plan_experts"]


class _Exchange(torch.autograd.Function):
    """Of each tensor `sent[i]` rows go to rank i, and `taken[i]` come from there; backward goes the
    other way. All in one, so that ranks do it in one order whatever is ready first."""

    @staticmethod
    def forward(
        ctx: Any, sent: Sequence[int], taken: Sequence[int], group: Any, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.way = taken, sent, group
        return tuple(_exchange(tensor, sent, taken, group) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return (None, None, None, *(_exchange(each, *ctx.way) for each in gradients))


def _exchange(tensor: Tensor, sent: Sequence[int], taken: Sequence[int], group: Any) -> Tensor:
    found = tensor.new_empty((sum(taken), *tensor.shape[1:]))
    given = keep_for_a_while(tensor.contiguous())
    dist.all_to_all_single(keep_for_a_while(found), given, [*taken], [*sent], group=group)
    return found


class _Split(torch.autograd.Function):
    """Of what all ranks of a group have, this rank's rows; the gradients are joined."""

    @staticmethod
    def forward(ctx: Any, rows: Sequence[int], group: Any, *wholes: Tensor) -> tuple[Tensor, ...]:
        ctx.way = rows, group
        return tuple(_own_rows(whole, rows, group) for whole in wholes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return (None, None, *(_joined(each, *ctx.way) for each in gradients))


class _Join(torch.autograd.Function):
    """The rows of all ranks of a group; of the gradient, which all have, this rank's rows."""

    @staticmethod
    def forward(ctx: Any, rows: Sequence[int], group: Any, part: Tensor) -> Tensor:
        ctx.way = rows, group
        return _joined(part, rows, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, _own_rows(gradients[0], *ctx.way)


def _own_rows(whole: Tensor, rows: Sequence[int], group: Any) -> Tensor:
    own = dist.get_rank(group)
    return whole.narrow(0, sum(rows[:own]), rows[own]).clone()


def _joined(part: Tensor, rows: Sequence[int], group: Any) -> Tensor:
    return _exchange(part.repeat(len(rows), 1), [len(part)] * len(rows), rows, group)


class Experts:
    """One module of experts: stands in for its forward. `mesh` is the ranks that they are dealt
    over, `alike` those that call it with the same tokens; None: all have others."""

    def __init__(self, name: str, module: nn.Module, mesh: Any, alike: Any) -> None:
        self.name, self.mesh, self.alike = name, mesh, alike
        self.module: Any = module
        self.num_experts = _num_experts(name, module)
        self.num_own = self.num_experts // mesh.size()
        self._forward, self._signature = module.forward, inspect.signature(module.forward)
        module.forward = torch.compiler.disable(self._called)  # type: ignore[no-untyped-call]

    def cut(self, absent: Set[nn.Parameter] = frozenset()) -> None:
        """Keep this rank's experts. Every rank has built the same weights, so nobody sends any.
        What stands for weights that are `absent` takes no memory afterwards either."""
        for owner, key, parameter in list(self._weights()):
            own = distribute_tensor(parameter.detach(), self.mesh, [Shard(0)], src_data_rank=None)
            owner.register_parameter(key, nn.Parameter(own, parameter.requires_grad))
            if parameter in absent:
                let_go(owner, key)

    def placement(self, num_ranks: int) -> Any:
        """Says of a weight along which dimension a rank's experts are cut over so many ranks: the
        first that they divide, as there may be fewer experts than ranks."""

        def choose(parameter: nn.Parameter) -> Shard:
            sizes = parameter.to_local().shape if isinstance(parameter, DTensor) else ()
            return Shard(next((dim for dim, n in enumerate(sizes) if n % num_ranks == 0), 0))

        return choose

    @contextmanager
    def undone(self) -> Iterator[None]:
        """The module as it was: whole weights, and all tokens its own."""
        replaced = self.module.__dict__.pop("forward")
        try:
            yield
        finally:
            self.module.forward = replaced

    def _weights(self) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
        for owner in self.module.modules():
            for key, parameter in owner._parameters.items():
                if parameter is not None:
                    yield owner, key, parameter

    @contextmanager
    def _own_weights(self) -> Iterator[None]:
        """The module has this rank's experts, and knows of no others."""
        weights, counted = list(self._weights()), "num_experts" in self.module.__dict__
        try:
            for owner, key, parameter in weights:
                owner._parameters[key] = cast(Any, parameter).to_local()
            if counted:
                self.module.num_experts = self.num_own
            yield
        finally:
            for owner, key, parameter in weights:
                owner._parameters[key] = parameter
            if counted:
                self.module.num_experts = self.num_experts

    def _called(self, *args: Any, **kwargs: Any) -> Tensor:
        """In place of the module's forward: (N, D), (N, K), (N, K) to (N, D)."""
        tokens, indices, weights = self._checked(*args, **kwargs)
        if self.alike is None:
            return self._dispatched(tokens, indices, weights)
        group, size = self.alike.get_group(), self.alike.size()
        rows = [len(part) for part in indices.tensor_split(size)]
        split, join = cast(Any, _Split.apply), cast(Any, _Join.apply)
        tokens, weights = split(rows, group, tokens, weights)
        answers = self._dispatched(tokens, _own_rows(indices, rows, group), weights)
        return cast(Tensor, join(rows, group, answers))

    def _dispatched(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """Tokens that no other rank has go to their experts, and come back."""
        group, size = self.mesh.get_group(), self.mesh.size()
        chosen = indices.flatten()
        order = chosen.argsort(stable=True)
        home = order // indices.shape[-1]
        counts = chosen.new_zeros(self.num_experts).index_add_(0, chosen, torch.ones_like(chosen))
        given = torch.empty_like(counts)
        dist.all_to_all_single(keep_for_a_while(given), keep_for_a_while(counts), group=group)
        # how much travels is known to the host alone: the one place that waits for a device
        sent, taken = torch.stack([counts, given]).view(2, size, -1).sum(-1).tolist()
        exchange = cast(Any, _Exchange.apply)
        rows, shares = exchange(
            sent, taken, group, tokens[home], weights.flatten()[order].unsqueeze(-1)
        )
        own = torch.arange(self.num_own, device=chosen.device).repeat(size)
        whose = own.repeat_interleave(given, output_size=len(rows)).unsqueeze(-1)
        back: Tensor = exchange(taken, sent, group, self._compute(rows, whose, shares))[0]
        return back.new_zeros(len(tokens), *back.shape[1:]).index_add(0, home, back)

    def _compute(self, rows: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """By this rank's experts. Given nothing, they compute a row of zeros that is dropped, since
        all ranks must have gradients, be they 0, and take part in each exchange of backward."""
        num_rows = len(rows)
        if not num_rows:
            rows, indices, weights = (
                torch.cat([each, each.new_zeros(1, each.shape[-1])])
                for each in (rows, indices, weights)
            )
        with self._own_weights():
            made: Tensor = self._forward(rows, indices, weights)
        return made[:num_rows]

    def _checked(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        given = self._signature.bind(*args, **kwargs).args
        shapes = [tuple(getattr(each, "shape", ())) for each in given]
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
        return cast("tuple[Tensor, Tensor, Tensor]", given)


def find_experts(module: nn.Module, parallel: Parallel, mesh: Any, alike: Any) -> list[Experts]:
    """The modules of experts that the recipe names, each given to `Experts`. Raises as
    `plan_experts` does, before anything is changed."""
    found = plan_experts(module, parallel, mesh.size())
    return [Experts(name, part, mesh, alike) for name, part in found.items()]


def plan_experts(module: nn.Module, parallel: Parallel, size: int) -> dict[str, nn.Module]:
    """The modules of experts that the recipe names, by name; changes nothing. Raises `RecipeError`
    for what cannot be dealt over so many ranks."""
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
    """By the first dimension of its weights."""
    shapes = {key: tuple(parameter.shape) for key, parameter in part.named_parameters()}
    numbers = {shape[0] if shape else 0 for shape in shapes.values()}
    counted: Any = getattr(part, "num_experts", None)
    if isinstance(counted, int):
        numbers.add(counted)
    apart = any(isinstance(each, (nn.ModuleList, nn.ModuleDict)) for each in part.modules())
    if apart or len(numbers) != 1 or 0 in numbers:
        seen = ", ".join(f"{key} {shape}" for key, shape in shapes.items()) or "none"
        raise RecipeError(
            f"Parallel.experts names {name!r}, whose weights are {seen}: they must be stacked, in "
            "all of them one row of dimension 0 for each expert, not modules of their own"
        )
    return numbers.pop()


def _check(
    name: str, part: nn.Module, size: int, found: dict[str, nn.Module], tied: set[str]
) -> None:
    """Raises `RecipeError` for a module that cannot be dealt over so many ranks."""
    number = _num_experts(name, part)
    if number % size:
        fits = largest_divisor(number, size)
        raise RecipeError(
            f"backend.expert={size} does not divide the {number} experts of {name!r}; "
            f"backend.expert={fits} would do"
        )
    if outer := next((other for other in found if name.startswith(f"{other}.")), None):
        raise RecipeError(f"Parallel.experts names {name!r}, which is inside of {outer!r}")
    own = dict(part.named_parameters())
    if shared := sorted(tied & {f"{name}.{key}" for key in own}):
        raise RecipeError(
            f"Parallel.experts names {name!r}, whose {', '.join(shared)} is tied to another "
            "weight: experts that layers share cannot be dealt"
        )
    if len(dtypes := {parameter.dtype for parameter in own.values()}) > 1:
        raise RecipeError(
            f"Parallel.experts names {name!r}, whose weights are of several dtypes "
            f"({', '.join(sorted(map(str, dtypes)))}): they are gathered together, in one"
        )
