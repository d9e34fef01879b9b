"""Stages of a pipeline: the blocks of each stage, and their computation by the model's own forward.

A stage runs the model's own `forward`. Blocks of earlier stages return their input. The stage's
first block receives the activation of the previous stage instead of its input. When the first block
of the next stage is called, the forward is left, and its input is this stage's result. So each
stage computes from the batch what the model gives to all blocks (positions, masks), and no model is
written for pipelines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from ...data.repeated_blocks import repeated_blocks
from ...kernel.errors import RecipeError
from ..common.buffers import write_unseen
from .matching import matching

__all__ = ["StageExit", "StageForward", "Stages", "original_forward", "placeholder"]


class Stages:
    """The partition of `module` into `number` stages, balanced by the weights that they compute
    with.
    """

    def __init__(self, module: nn.Module, patterns: Sequence[str], number: int) -> None:
        self.number = number
        self.blocks = _blocks(module, patterns, number)
        weights = [_num_weights(module.get_submodule(name)) for name in self.blocks]
        places = self._block_indices(module)
        for name, part in module.named_modules():
            of_own = sum(p.numel() for p in part.parameters(recurse=False))
            in_block = any(each in self.blocks for each in _parents(name))
            if places[name] >= 0 and not in_block and not isinstance(part, nn.Embedding):
                weights[places[name]] += of_own
        self.starts = _partition(weights, number)
        """The first block of each stage."""
        self.stage_of_block = [
            sum(start <= index for start in self.starts) - 1 for index in range(len(self.blocks))
        ]
        self.of: dict[str, int] = {}
        """The stage of each parameter and buffer, by all of its names."""
        tensors = (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        )
        for name, _ in tensors:
            self.of[name] = self.stage_of_block[max(places[name.rpartition(".")[0]], 0)]
        self._of_modules = {
            name: self.stage_of_block[max(place, 0)] for name, place in places.items()
        }
        self._around_blocks = {name for name, _ in tensors if places[name.rpartition(".")[0]] < 0}

    def of_module(self, name: str) -> int:
        """Return the stage of a module, or of the one around it that the model has."""
        while name and name not in self._of_modules:
            name = name.rpartition(".")[0]
        return self._of_modules.get(name, 0)

    def _block_indices(self, module: nn.Module) -> dict[str, int]:
        """Return for each submodule the index of its block, or of the block before it. It is 0
        before the first block, and -1 for modules that contain blocks.
        """
        places, last = {}, 0
        numbers = {name: index for index, name in enumerate(self.blocks)}
        for name, _ in module.named_modules(remove_duplicate=False):
            inside = [numbers[each] for each in _parents(name) if each in numbers]
            last = inside[0] if inside else last
            around = any(block.startswith(f"{name}." if name else "") for block in self.blocks)
            places[name] = -1 if around else last
        return places

    def holders(self, module: nn.Module) -> dict[nn.Parameter, frozenset[int]]:
        """Return the stages that hold each parameter. Several stages hold a parameter that is tied
        between them. All stages hold one whose module contains blocks, and a frozen one outside of
        blocks: it has no gradient to show which stages use it.
        """
        found: dict[nn.Parameter, set[int]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            in_block = any(each in self.blocks for each in _parents(name))
            everywhere = name in self._around_blocks or not (parameter.requires_grad or in_block)
            stages = range(self.number) if everywhere else (self.of[name],)
            found.setdefault(parameter, set()).update(stages)
        return {parameter: frozenset(stages) for parameter, stages in found.items()}


def _parents(name: str) -> Iterator[str]:
    """Yield a name and the names of all modules that contain it."""
    parts = name.split(".")
    return (".".join(parts[: n + 1]) for n in range(len(parts)))


def _blocks(module: nn.Module, patterns: Sequence[str], number: int) -> list[str]:
    """Return the names of the blocks, in the model's order."""
    names = {part: name for name, part in module.named_modules()}
    if patterns:
        matched = {name for _, name in matching(module, "stages", patterns)}
        inner = {n for n in matched if any(n.startswith(f"{other}.") for other in matched)}
        found = [name for name in names.values() if name in matched - inner]
        reason = f"Parallel.stages={list(patterns)} names {len(found)}"
    else:
        found = [names[part] for part in repeated_blocks(module)]
        reason = f"the model has {len(found) or 'no'} repeated ones"
    if len(found) >= number:
        return found
    remedy = f"set backend.pipeline so that there are at most {len(found)}, or " if found else ""
    raise RecipeError(
        f"blocks are partitioned into {number} stages, and {reason}: {remedy}give the recipe "
        "parallel=drivetrain.Parallel(stages=[PATTERN, ...]) with as many at least; or set "
        "backend.pipeline=1"
    )


def _num_weights(part: nn.Module) -> int:
    """Count the parameters that a block computes with. Embeddings are left out: a lookup touches
    few rows.
    """
    return sum(
        sum(p.numel() for p in each.parameters(recurse=False))
        for each in part.modules()
        if not isinstance(each, nn.Embedding)
    )


def _partition(costs: Sequence[int], number: int) -> list[int]:
    """Return the first index of each of `number` contiguous runs. The largest sum of costs of a run
    is as small as possible.
    """
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


class StageExit(BaseException):
    """Leaves the model's forward at the end of a stage. No error: user's code must not catch it."""

    def __init__(self, activation: Any) -> None:
        super().__init__("a stage has ended")
        self.activation = activation


@contextmanager
def original_forward(module: Any, forward: Callable[..., Any] | None) -> Iterator[None]:
    """Within the block, undo the replacement of a module's forward. `forward`: an attribute of the
    module before; None: it had the method of its class.
    """
    replaced = module.__dict__.pop("forward")
    if forward is not None:
        module.forward = forward
    try:
        yield
    finally:
        module.forward = replaced


class StageForward:
    """Runs the forward of `module` from the first block of a stage to the first block of the next.
    `own`: the stages of this rank.
    """

    def __init__(self, module: nn.Module, stages: Stages, own: Sequence[int]) -> None:
        self.module, self.stages, self.own = module, stages, own
        self.blocks = [module.get_submodule(name) for name in stages.blocks]
        self._stage, self._next = -1, 0
        self._received: Tensor | None = None
        self._originals = {block: block.__dict__.get("forward") for block in self.blocks}
        for index, block in enumerate(self.blocks):
            block.forward = partial(self._block_forward, index, block.forward)
        for stage, start in enumerate(stages.starts):
            if stage and {stage, stage - 1} & {*own}:
                # before hooks that gather its weights, or partition its input
                self.blocks[start].register_forward_pre_hook(
                    self._boundary_hook(stage), with_kwargs=True, prepend=True
                )

    @contextmanager
    def original_forwards(self) -> Iterator[None]:
        """Restore the forwards of all blocks within the block."""
        with ExitStack() as stack:
            for block, forward in self._originals.items():
                stack.enter_context(original_forward(block, forward))
            yield

    def run(
        self,
        stage: int,
        received: Tensor | None,
        forward: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Return the output of a stage for the activation that it received: an activation, or the
        model's return value. Raises `RecipeError` for a model that is not a sequence of blocks.
        """
        self._stage, self._received = stage, received
        self._next = self.stages.starts[stage]
        try:
            with self._keep_buffers_of_other_stages(stage):
                output = forward(*args, **kwargs)
        except StageExit as end:
            return end.activation
        except RecipeError:
            raise
        except Exception as error:
            first = self.stages.starts[stage]
            if not stage or self._next > first:
                raise
            name = self.stages.blocks[first]
            raise RecipeError(
                f"the model's forward failed on its way to {name!r}, where a stage begins "
                f"({type(error).__name__}: {error}). Blocks of earlier stages return their "
                f"first argument on this rank: each must return a tensor like it. {_REMEDY}"
            ) from error
        finally:
            self._stage, self._received = -1, None
        missed = self.stages.blocks[self._next : self._next + 1]
        if missed:
            raise RecipeError(
                f"the model's forward has not called {missed[0]!r}, one of the blocks that are "
                f"partitioned into stages: each must be called, in the model's order. {_REMEDY}"
            )
        return output

    @contextmanager
    def _keep_buffers_of_other_stages(self, stage: int) -> Iterator[None]:
        """Let each stage of a rank that has several change its own buffers alone; the model's
        forward is called for each of them.
        """
        if len(self.own) == 1 or not self.module.training:
            yield
            return
        kept = [b for name, b in self.module.named_buffers() if self.stages.of[name] != stage]
        before = [buffer.detach().clone() for buffer in kept]
        try:
            yield
        finally:
            write_unseen(kept, before)

    def _boundary_hook(self, stage: int) -> Callable[..., Any]:
        """Return a hook for the first block of a stage. It replaces the block's input by the
        previous stage's activation, or, while the previous stage runs, leaves the forward with that
        input.
        """
        start = self.stages.starts[stage]

        def receive_or_exit(block: nn.Module, args: Any, kwargs: Any) -> Any:
            if self._stage == stage - 1 and self._next == start:
                first = _first_argument(args, kwargs)
                raise StageExit(_activation(first, f"{self.stages.blocks[start]!r} is given"))
            if self._stage != stage:
                return None
            if args:
                return (self._received, *args[1:]), kwargs
            return args, {**kwargs, next(iter(kwargs)): self._received}

        return receive_or_exit

    def _block_forward(
        self, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Forward that replaces a block's."""
        name = self.stages.blocks[index]
        if self._stage < 0 and self.stages.stage_of_block[index] in self.own:
            return forward(*args, **kwargs)
        if self._stage < 0:
            raise RecipeError(
                f"{name!r}, which another rank has, was called otherwise than by the forward of "
                "the whole model, as generate does of a model with an adapter by PEFT, whose base "
                "model it calls. Call the model itself, or set backend.pipeline=1"
            )
        if index < self.stages.starts[self._stage]:
            return _first_argument(args, kwargs)
        if index != self._next:
            expected = self.stages.blocks[self._next : self._next + 1]
            raise RecipeError(
                f"the model's forward has called {name!r} where "
                f"{repr(expected[0]) if expected else 'the end'} was due: blocks that are "
                f"partitioned into stages must be called once each, in the model's order. {_REMEDY}"
            )
        self._next += 1
        output = forward(*args, **kwargs)
        return _activation(output, f"{name!r} returns")


_REMEDY = "Name other blocks in Parallel.stages, or set backend.pipeline=1"


def _first_argument(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the first argument of a block."""
    return args[0] if args else next(iter(kwargs.values()), None)


def _activation(value: Any, what: str) -> Tensor:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value
    seen = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
    raise RecipeError(
        f"{what} {seen}: a stage sends one tensor of floating point numbers. {_REMEDY}"
    )


def placeholder(weight: Tensor, device: torch.device) -> nn.Parameter:
    """Return a placeholder for a weight that lies on another rank: zeros of its shape that take no
    memory.
    """
    zero = torch.zeros((), dtype=weight.dtype, device=device)
    return nn.Parameter(zero.expand(weight.shape), weight.requires_grad)
