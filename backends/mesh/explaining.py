"""Explain torch's shape errors of partitioned layers in the words of the partition plan."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import Any

from torch import nn

from ...kernel.errors import RecipeError

__all__ = ["explain_shapes"]

_SHAPE_ERRORS = re.compile(
    r"cannot be multiplied|multiply up|must match the size|invalid for input of size|"
    r"same reduction dim|normalized_shape|sharding strategy|split_with_sizes|expected input"
)


def explain_shapes(module: nn.Module, plan: Mapping[str, str]) -> None:
    """Let the module's forward raise `RecipeError` that names `Parallel.tensor` when it fails for a
    shape. `plan`: pattern -> style of the partition.
    """
    module.forward = partial(_forward, module, module.forward, plan)


def _forward(
    module: nn.Module,
    forward: Callable[..., Any],
    plan: Mapping[str, str],
    *args: Any,
    **kwargs: Any,
) -> Any:
    try:
        return forward(*args, **kwargs)
    except (AssertionError, RuntimeError, ValueError) as error:
        if not (_SHAPE_ERRORS.search(str(error)) or _is_dtensor_assertion(error)):
            raise
        where = _failing_module(module, error.__traceback__)
        given = ", ".join(f"{pattern!r}: {how!r}" for pattern, how in [*plan.items()][:12])
        raise RecipeError(
            f"the model's forward failed in {where}, with layers partitioned by "
            f"Parallel.tensor={{{given}}} ({type(error).__name__}: {error}). A 'column' layer "
            "returns a part of the channels, which only a 'row' layer accepts: name both of a "
            "pair. Heads are partitioned, too: backend.tensor must divide their number, and a "
            "forward that reshapes them must use -1 for it. With 'sequence' name each norm in "
            "between by 'sequence'. Hooks see parts, and cannot combine all positions. Or set "
            "backend.tensor=1"
        ) from error


def _is_dtensor_assertion(error: Exception) -> bool:
    """True for an assertion of torch's about placements, which has no text."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__"))
    return isinstance(error, AssertionError) and where.startswith("torch.distributed.tensor")


def _failing_module(module: nn.Module, trace: TracebackType | None) -> str:
    """Name the innermost submodule that was computing."""
    names = {part: name for name, part in module.named_modules()}
    inside = [names[part] for part in _modules_in_traceback(trace) if names.get(part)]
    return repr(inside[-1]) if inside else "the model"


def _modules_in_traceback(trace: TracebackType | None) -> Iterator[nn.Module]:
    while trace is not None:
        part = trace.tb_frame.f_locals.get("self")
        if isinstance(part, nn.Module):
            yield part
        trace = trace.tb_next
