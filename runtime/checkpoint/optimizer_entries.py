"""The names and values by which all drivers store an optimizer's state in a checkpoint.

A value that is not a tensor has its type in its name: `<key>:int`, `:float` and `:bool` are 0-d
(float64, or int64 where that is not exact), `:none` is a 0, and `:list` and `:tuple` hold a length;
their items are `<key>.0`, `<key>.1` and so on.

A tensor of a parameter's state whose dtype is not the parameter's has its dtype in its name, as in
`<key>:float32` or `<key>:bfloat16`. Without it, real numbers have the parameter's dtype, whichever
that is in the run that resumes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from ..kernel.errors import CheckpointDamaged

__all__ = [
    "AVERAGE",
    "EXTRA",
    "GROUP",
    "beside_state",
    "can_be_stored",
    "copied",
    "dtype_of",
    "flat",
    "is_state",
    "nested",
    "same",
    "settings_of",
    "unsaved",
    "unstorable",
    "without_dtype",
]


AVERAGE = "average"
"""`<fqn>/average` is not optimizer state, but the average of a weight."""
GROUP = "group."
EXTRA = "extra."
"""`<fqn>/extra.<key>` is an entry of an optimizer's `state_dict` besides state and groups."""


def is_state(key: str) -> bool:
    """True for a parameter's entry that only its optimizer interprets."""
    return key != AVERAGE and not key.startswith((GROUP, EXTRA))


_NUMBERS: dict[type, str] = {bool: ":bool", int: ":int", float: ":float", type(None): ":none"}


_SEQUENCES: dict[type, str] = {list: ":list", tuple: ":tuple"}


_DTYPES = {
    f":{str(dtype).removeprefix('torch.')}": dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex)
}


def dtype_of(name: str) -> torch.dtype | None:
    """Return the dtype that a stored name says its tensor had; None if it says none."""
    return _DTYPES.get(f":{name.rpartition(':')[2]}") if ":" in name else None


def without_dtype(name: str) -> str:
    """Return a stored name without the dtype of its tensor."""
    return name if dtype_of(name) is None else name.rpartition(":")[0]


def _kind(value: Any, kinds: Iterable[type]) -> type | None:
    """Return the first of these types that the value is an instance of: a bool is an int, too."""
    return next((kind for kind in kinds if isinstance(value, kind)), None)


def can_be_stored(value: Any) -> bool:
    """True for a tensor, a number, None, or a list or tuple of these."""
    if _kind(value, _SEQUENCES):
        return all(map(can_be_stored, value))
    return isinstance(value, Tensor) or _kind(value, _NUMBERS) is not None


def flat(key: str, value: Any, like: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield an entry in its stored form; nothing if it cannot be stored (see `unsaved`). `like`:
    the dtype that a tensor has if its name says none; None: the dtype in which it is stored."""
    if isinstance(value, Tensor):
        narrow = value.is_floating_point() and value.element_size() < 4
        own = value.detach() if value.requires_grad else value  # it takes long for a DTensor
        stored = own.float() if narrow else own
        mark = f":{str(value.dtype).removeprefix('torch.')}"
        plain = mark not in _DTYPES or key == "step" or value.dtype == (like or stored.dtype)
        yield key if plain else key + mark, stored
    elif not can_be_stored(value):
        return
    elif kind := _kind(value, _SEQUENCES):
        yield key + _SEQUENCES[kind], torch.tensor(len(value), dtype=torch.float64)
        for index, item in enumerate(value):
            yield from flat(f"{key}.{index}", item, like)
    elif kind := _kind(value, _NUMBERS):
        exact = kind is not int or abs(value) <= 2**53
        dtype = torch.float64 if exact else torch.int64
        yield key + _NUMBERS[kind], torch.tensor(value or 0, dtype=dtype)


def nested(entries: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Rebuild the values that `flat` stored. Raises `CheckpointDamaged`, naming the entry (its key
    with the prefix `where`), for entries that `flat` cannot have written."""
    left = dict(entries)

    def take(key: str) -> Any:
        for kind, mark in _NUMBERS.items():
            if key + mark in left:
                return _number(f"{where}{key}{mark}", left.pop(key + mark), kind)
        for kind, mark in _SEQUENCES.items():
            if key + mark in left:
                length = _number(f"{where}{key}{mark}", left.pop(key + mark), int)
                if not 0 <= length <= len(left):
                    raise CheckpointDamaged(f"optimizer {where + key + mark!r} is {length}")
                return kind(take(f"{key}.{index}") for index in range(length))
        for mark, dtype in _DTYPES.items():
            if key + mark in left:
                return left.pop(key + mark).to(dtype)
        if key not in left:
            raise CheckpointDamaged(f"optimizer {where + key!r} is missing in the checkpoint")
        tensor = left.pop(key)
        if key == "step" and not 0 <= tensor.max() < math.inf:
            raise CheckpointDamaged(f"optimizer {where + key!r} is {tensor} in the checkpoint")
        return tensor

    sequences = [key for key in left if key.endswith(tuple(_SEQUENCES.values()))]
    outer_first = [key.rpartition(":")[0] for key in sorted(sequences, key=len)]
    result = {key: take(key) for key in outer_first if _is_left(key, left)}
    while left:
        key = next(iter(left)).partition(":")[0]
        result[key] = take(key)
    return result


def _is_left(key: str, left: Mapping[str, Any]) -> bool:
    return any(key + mark in left for mark in _SEQUENCES.values())


def _number(name: str, stored: Tensor, kind: type) -> Any:
    value = stored.item() if stored.numel() == 1 else math.nan
    whole = float(value).is_integer()
    if stored.dim() or (kind is not float and not whole):
        shown = f"shape {tuple(stored.shape)}" if stored.dim() else value
        raise CheckpointDamaged(f"optimizer {name!r:.200} is {shown}, which is no {kind.__name__}")
    return None if kind is type(None) else kind(value)


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group: all entries but the parameters."""
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


def unstorable(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of those settings of a parameter group that a checkpoint cannot hold."""
    return {k: copied(v) for k, v in settings_of(group).items() if not can_be_stored(v)}


def beside_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the entries of a custom optimizer's `state_dict` beside state and groups, such as a
    count or a list of moments.
    """
    if type(optimizer).state_dict is torch.optim.Optimizer.state_dict and not getattr(
        optimizer, "_optimizer_state_dict_post_hooks", None
    ):
        return {}
    packed = optimizer.state_dict()
    return {key: value for key, value in packed.items() if key not in ("state", "param_groups")}


def unsaved(optimizer: torch.optim.Optimizer, built: Iterable[Mapping[str, Any]] = ()) -> list[str]:
    """Return the names of optimizer entries that no checkpoint can hold: objects that are neither
    tensors nor numbers, state of no parameter, and entries `beside_state` in tensors that are
    sharded over ranks. `built`: the `unstorable` settings of each group when the optimizer was
    built. Those that have not changed since are left out: the recipe sets them again."""
    states: dict[Any, Mapping[str, Any]] = dict(optimizer.state)
    found = {str(key) for key in states if not isinstance(key, Tensor)}
    for group, before in zip(optimizer.param_groups, built, strict=False):
        for key, value in unstorable(group).items():
            if key not in before or not same(value, before[key]):
                found.add(key)
    for parameter, state in states.items():
        if isinstance(parameter, Tensor):
            found |= {key for key, value in state.items() if not can_be_stored(value)}
    several = getattr(optimizer, "optimizers", None)
    for kind in several.values() if isinstance(several, Mapping) else ():
        found |= {str(key) for key in beside_state(kind)}
    beside = beside_state(optimizer)
    found |= {str(k) for k, v in beside.items() if not _is_whole(v)}
    if beside and "state" not in optimizer.state_dict():
        found.add("a state_dict() without 'state'")
    return sorted(found)


def _is_whole(value: Any) -> bool:
    """True if the value can be stored and holds no shard of a tensor."""
    if _kind(value, _SEQUENCES):
        return all(map(_is_whole, value))
    return can_be_stored(value) and not hasattr(value, "placements")


def copied(value: Any) -> Any:
    """Return a copy that shares no memory."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    kind = _kind(value, _SEQUENCES)
    return kind(copied(item) for item in value) if kind else value


def same(a: Any, b: Any) -> bool:
    """True for the same object, and for equal values of one type; tensors are compared element by
    element."""
    if a is b:
        return True
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items())
    if kind := _kind(a, _SEQUENCES):
        if not isinstance(b, kind) or len(a) != len(cast(Any, b)):
            return False
        return all(same(x, y) for x, y in zip(a, cast(Any, b), strict=True))
    return type(a) is type(b) and bool(a == b)
