"""The stages of a pipeline: which blocks each has, and how it computes them by the model's forward.

A stage runs the model's own `forward`. Blocks before its own hand their input through; its first
block is given what the stage before has sent instead; where the next stage's first block is called,
the forward is left with what that was to be given. So a stage makes by itself, of the batch, what
the model gives all blocks (positions, masks), and no model is written for this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from ...kernel.errors import RecipeError
from ..common.buffers import write_unseen
from ..fsdp import wrap_units
from .matching import matching

__all__ = ["Left", "StageForward", "Stages"]


class Stages:
    """Of `module`, dealt into `number` stages by the number of weights that they compute with."""

    def __init__(self, module: nn.Module, patterns: Sequence[str], number: int) -> None:
        self.number = number
        self.blocks = _blocks(module, patterns, number)
        weights = [_num_weights(module.get_submodule(name)) for name in self.blocks]
        places = self._places(module)
        for name, part in module.named_modules():
            of_own = sum(p.numel() for p in part.parameters(recurse=False))
            in_block = any(each in self.blocks for each in _parents(name))
            if places[name] >= 0 and not in_block and not isinstance(part, nn.Embedding):
                weights[places[name]] += of_own
        self.starts = _dealt(weights, number)
        """The first block of each stage."""
        self.of_block = [
            sum(start <= index for start in self.starts) - 1 for index in range(len(self.blocks))
        ]
        self.of: dict[str, int] = {}
        """The stage of each parameter and buffer, by all of its names."""
        tensors = (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        )
        for name, _ in tensors:
            self.of[name] = self.of_block[max(places[name.rpartition(".")[0]], 0)]
        self._around = {name for name, _ in tensors if places[name.rpartition(".")[0]] < 0}

    def _places(self, module: nn.Module) -> dict[str, int]:
        """Of each submodule the block that it is in, or the one before it; 0 before the first, and
        -1 of those that blocks are in."""
        places, last = {}, 0
        numbers = {name: index for index, name in enumerate(self.blocks)}
        for name, _ in module.named_modules(remove_duplicate=False):
            inside = [numbers[each] for each in _parents(name) if each in numbers]
            last = inside[0] if inside else last
            around = any(block.startswith(f"{name}." if name else "") for block in self.blocks)
            places[name] = -1 if around else last
        return places

    def holders(self, module: nn.Module) -> dict[nn.Parameter, frozenset[int]]:
        """The stages that have each parameter: several, where it is tied between them, and all
        where its module is around the blocks."""
        found: dict[nn.Parameter, set[int]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            stages = range(self.number) if name in self._around else (self.of[name],)
            found.setdefault(parameter, set()).update(stages)
        return {parameter: frozenset(stages) for parameter, stages in found.items()}


def _parents(name: str) -> Iterator[str]:
    """Of a name itself and all that it is in."""
    parts = name.split(".")
    return (".".join(parts[: n + 1]) for n in range(len(parts)))


def _blocks(module: nn.Module, patterns: Sequence[str], number: int) -> list[str]:
    """The names of the blocks, in the model's order."""
    names = {part: name for name, part in module.named_modules()}
    if patterns:
        fitting = {name for _, name in matching(module, "stages", patterns)}
        inner = {n for n in fitting if any(n.startswith(f"{other}.") for other in fitting)}
        found = [name for name in names.values() if name in fitting - inner]
        said = f"Parallel.stages={list(patterns)} names {len(found)}"
    else:
        found = [names[part] for part in wrap_units.repeated(module)]
        said = f"the model has {len(found) or 'no'} repeated ones"
    if len(found) >= number:
        return found
    remedy = f"set backend.pipeline so that there are at most {len(found)}, or " if found else ""
    raise RecipeError(
        f"blocks are dealt to {number} stages, and {said}: {remedy}give the recipe "
        "parallel=drivetrain.Parallel(stages=[PATTERN, ...]) with as many at least; or set "
        "backend.pipeline=1"
    )


def _num_weights(part: nn.Module) -> int:
    """That it computes with: of an embedding it takes a few rows."""
    return sum(
        sum(p.numel() for p in each.parameters(recurse=False))
        for each in part.modules()
        if not isinstance(each, nn.Embedding)
    )


def _dealt(costs: Sequence[int], number: int) -> list[int]:
    """Where each of `number` runs of neighbours begins, so that the costliest costs least."""
    sums = [0, *accumulate(costs)]
    best: list[tuple[float, list[int]]] = [(float(total), [0]) for total in sums]
    for runs in range(2, number + 1):
        longer: list[tuple[float, list[int]]] = [(float("inf"), [])] * len(sums)
        for end in range(runs, len(sums)):
            longer[end] = min(
                (max(best[start][0], sums[end] - sums[start]), [*best[start][1], start])
                for start in range(runs - 1, end)
            )
        best = longer
    return best[-1][1]


class Left(BaseException):
    """The model's forward is left at the end of a stage; no error, and nothing to be caught."""

    def __init__(self, activation: Any) -> None:
        super().__init__("a stage has ended")
        self.activation = activation


class StageForward:
    """Runs the forward of `module` from the first block of a stage to the next stage's. `own`: the
    stages of this rank."""

    def __init__(self, module: nn.Module, stages: Stages, own: Sequence[int]) -> None:
        self.module, self.stages, self.own = module, stages, own
        self.blocks = [module.get_submodule(name) for name in stages.blocks]
        self._stage, self._next = -1, 0
        self._received: Tensor | None = None
        self._replaced: dict[nn.Module, Any] = {}
        self._replace()
        for stage, start in enumerate(stages.starts):
            if stage and {stage, stage - 1} & {*own}:
                # before what gathers its weights, or cuts what it is given
                self.blocks[start].register_forward_pre_hook(
                    self._reached(stage), with_kwargs=True, prepend=True
                )

    def _replace(self) -> None:
        for index, block in enumerate(self.blocks):
            self._replaced[block] = block.__dict__.get("forward")
            block.forward = partial(self._called, index, block.forward)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """The model as it was."""
        for block, forward in self._replaced.items():
            del block.forward
            if forward is not None:
                block.forward = forward
        try:
            yield
        finally:
            self._replace()

    def run(
        self,
        stage: int,
        received: Tensor | None,
        forward: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """What that stage makes of what it has received: an activation, or what the model
        returns. Raises `RecipeError` for a model that is no row of blocks."""
        self._stage, self._received = stage, received
        self._next = self.stages.starts[stage]
        try:
            with self._of_other_stages_kept(stage):
                made = forward(*args, **kwargs)
        except Left as left:
            return left.activation
        except RecipeError:
            raise
        except Exception as error:
            first = self.stages.starts[stage]
            if not stage or self._next > first:
                raise
            name = self.stages.blocks[first]
            raise RecipeError(
                f"the model's forward failed on its way to {name!r}, where a stage begins "
                f"({type(error).__name__}: {error}). Blocks before it hand their first argument "
                f"through, and must return its like. {_REMEDY}"
            ) from error
        finally:
            self._stage, self._received = -1, None
        missed = self.stages.blocks[self._next : self._next + 1]
        if missed:
            raise RecipeError(
                f"the model's forward has not called {missed[0]!r}, one of the blocks that are "
                f"dealt to stages: each must be called, in the model's order. {_REMEDY}"
            )
        return made

    @contextmanager
    def _of_other_stages_kept(self, stage: int) -> Iterator[None]:
        """Where a rank has several stages, each changes its own buffers alone: the model's forward
        is called for each of them."""
        if len(self.own) == 1 or not self.module.training:
            yield
            return
        kept = [b for name, b in self.module.named_buffers() if self.stages.of[name] != stage]
        before = [buffer.detach().clone() for buffer in kept]
        try:
            yield
        finally:
            write_unseen(kept, before)

    def _reached(self, stage: int) -> Callable[..., Any]:
        """Called before the first block of that stage is: it is given what the stage before has
        made, which is left here."""
        start = self.stages.starts[stage]

        def give_or_leave(block: nn.Module, args: Any, kwargs: Any) -> Any:
            if self._stage == stage - 1 and self._next == start:
                raise Left(_tensor(_first(args, kwargs), f"{self.stages.blocks[start]!r} is given"))
            if self._stage != stage:
                return None
            if args:
                return (self._received, *args[1:]), kwargs
            return args, {**kwargs, next(iter(kwargs)): self._received}

        return give_or_leave

    def _called(self, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """In place of the forward of a block."""
        name = self.stages.blocks[index]
        if self._stage < 0 and self.stages.of_block[index] in self.own:
            return forward(*args, **kwargs)
        if self._stage < 0:
            raise RecipeError(
                f"{name!r}, which another rank has, was called otherwise than by the forward of "
                "the whole model, as generate does of a model with an adapter by PEFT, whose base "
                "model it calls. Call the model itself, or set backend.pipeline=1"
            )
        if index < self.stages.starts[self._stage]:
            return _first(args, kwargs)
        if index != self._next:
            expected = self.stages.blocks[self._next : self._next + 1]
            raise RecipeError(
                f"the model's forward has called {name!r} where "
                f"{repr(expected[0]) if expected else 'the end'} was due: blocks that are dealt to "
                f"stages must be called once each, in the model's order. {_REMEDY}"
            )
        self._next += 1
        made = forward(*args, **kwargs)
        return _tensor(made, f"{name!r} returns")


_REMEDY = "Name other blocks in Parallel.stages, or set backend.pipeline=1"


def _first(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a block is given first."""
    return args[0] if args else next(iter(kwargs.values()), None)


def _tensor(value: Any, what: str) -> Tensor:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value
    seen = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
    raise RecipeError(
        f"{what} {seen}: between stages goes one tensor of floating point numbers. {_REMEDY}"
    )


def hollow(weight: Tensor, device: torch.device) -> nn.Parameter:
    """What stands for a weight that is not here: zeros of its shape that take no memory."""
    zero = torch.zeros((), dtype=weight.dtype, device=device)
    return nn.Parameter(zero.expand(weight.shape), weight.requires_grad)
