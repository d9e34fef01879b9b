"""Decides for a program that reads a tensor without elements: as in a healthy run."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..data.nested import tensors_of
from .modes import Mode, is_fake, without_modes

__all__ = ["HealthyValues"]

_READS = frozenset({"_local_scalar_dense"})
_COMPARISONS = frozenset({"allclose", "equal"})
_ZERO = frozenset({"zeros", "isinf", "isnan", "lt"})
"""Operations whose results are zero, or false: of a search for faults, and of `x < 0`."""
_NEGATIONS = frozenset({"bitwise_not", "logical_not"})
_REPLACING = frozenset({"copy_"})
"""Operations that replace the values of their first tensor."""
_KEEPING = frozenset({"broadcast_", "allreduce_"})
"""Collectives that leave rank 0 the values that it had; of sums, if these are zero."""


class HealthyValues(Mode):
    """A mode in which numbers that a program reads are one, and conditions hold, unless the values
    are known. What is computed from zeros alone is zero: thus a search for infinite or negative
    elements finds none. Tensors with elements are computed with as always."""

    def __init__(self) -> None:
        self._zeros: Any = WeakTensorKeyDictionary()

    def run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """See `Mode`."""
        name, tensors = func.overloadpacket.__name__, [*tensors_of([args, kwargs])]
        fakes = [each for each in tensors if is_fake(each)]
        if fakes and name in _READS:
            return self._value(fakes[0])
        if fakes and name in _COMPARISONS:
            return True
        if fakes and name in _KEEPING and _stay(fakes, name == "allreduce_"):
            with without_modes():
                return args[0], func([torch.zeros(1)], *args[1:], **kwargs)[1]
        is_real = not fakes and tensors and all(type(each) is Tensor for each in tensors)
        with without_modes() if is_real else nullcontext():
            result = func(*args, **kwargs)
        self._mark(name, fakes, result)
        return result

    def _mark(self, name: str, given: list[Tensor], result: Any) -> None:
        """Note which results are zero."""
        given = given[name in _REPLACING :]
        is_zero = bool(given) and all(each in self._zeros for each in given)
        if name in _NEGATIONS:
            is_zero = not is_zero
        for each in tensors_of(result):
            if is_fake(each):
                if is_zero or name in _ZERO:
                    self._zeros[each] = None
                else:
                    self._zeros.pop(each, None)

    def _value(self, scalar: Any) -> Any:
        if scalar.constant is not None:
            return scalar.constant.item()
        with without_modes():
            fill = torch.zeros if scalar in self._zeros else torch.ones
            return fill((), dtype=scalar.dtype).item()


def _stay(tensors: list[Any], are_added: bool) -> bool:
    """Return True if the values of these tensors are known, and are zero if ranks add theirs."""
    known = [each.constant for each in tensors]
    return all(each is not None and not (are_added and each.any()) for each in known)
