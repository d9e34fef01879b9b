"""State of modules besides parameters and buffers, in a checkpoint: the results of
`get_extra_state`, and what hooks add to a `state_dict`.

A value has the key that it has in the `state_dict` of the model. It is saved as tensors of the kind
`state`:

`extra/<key>/json`
    The value as UTF-8 text, in uint8. None, numbers, strings and booleans are themselves. Other
    types are an object of one key: `list`, `tuple`, `dict`, `OrderedDict` (with a list of pairs),
    `tensor` (in host memory), `device tensor`, `bytes`, `bytearray` and `BytesIO` (with a number).
`extra/<key>/<n>`
    The tensor, or the bytes, of that number.
`extra.<rank>/<key>/...`
    The same of another rank than 0, if the rank's value differs from rank 0's.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from ..kernel.errors import CheckpointDamaged, RecipeError
from ..kernel.shards import Reader
from .buffers import memory
from .format import safetensors, strict_json

__all__ = [
    "EXTRA",
    "decode",
    "digest",
    "encode",
    "extra_key",
    "extra_state",
    "give_extra_state",
    "is_left_out",
    "read_extra_state",
    "stored_keys",
    "weight_names",
    "without_extra_state",
]

EXTRA = "extra"
_JSON = "json"
_LEAF = "_extra_state"
_SCALARS = (bool, int, float, str, type(None))
_PLAIN: dict[str, type] = {"list": list, "tuple": tuple, "dict": dict, "OrderedDict": OrderedDict}
_BYTES: dict[str, type] = {"bytes": bytes, "bytearray": bytearray, "BytesIO": io.BytesIO}
_ON_DEVICE = "device tensor"
_MAX_DEPTH = 30
_ADVICE = (
    "Return tensors, numbers, strings, bytes, None, and lists, tuples and dicts of these from "
    "get_extra_state and from hooks of state_dict (bytes may hold anything that set_extra_state "
    "can read), or keep the value in a buffer"
)

_left_out: ContextVar[bool] = ContextVar("extra_state_left_out", default=False)


@contextlib.contextmanager
def without_extra_state() -> Iterator[None]:
    """Enclose a call of `Engine.shards` that needs no extra state, which is read from the device
    and compared between ranks."""
    token = _left_out.set(True)
    try:
        yield
    finally:
        _left_out.reset(token)


def is_left_out() -> bool:
    """Return True within `without_extra_state`."""
    return _left_out.get()


# --- values of a module -----------------------------------------------------------------------


def weight_names(module: nn.Module) -> set[str]:
    """Return all names of the parameters and buffers."""
    named = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    return {name for name, _ in named}


def extra_state(module: nn.Module, weights: Collection[str] = ()) -> dict[str, Any]:
    """Return the entries of the module's `state_dict` that are neither a parameter or buffer nor
    another name of one. `weights`: further names of parameters and buffers."""
    packed = module.state_dict(keep_vars=True)
    known = weight_names(module) | set(weights)
    if packed.keys() <= known:
        return {}
    tensors = (*module.parameters(), *module.buffers())
    places = {place for tensor in tensors for place in _places(tensor)}
    return {
        key: value
        for key, value in packed.items()
        if key not in known
        and not (isinstance(value, Tensor) and not places.isdisjoint(_places(value)))
    }


def _places(tensor: Tensor) -> Iterator[tuple[str, int]]:
    """Yield what two names of one tensor have in common."""
    yield "object", id(tensor)
    if type(tensor) in (Tensor, nn.Parameter):
        with contextlib.suppress(RuntimeError):  # a device without addresses
            yield "memory", tensor.data_ptr() or -id(tensor)


def give_extra_state(module: nn.Module, values: Mapping[str, Any]) -> list[str]:
    """Give the module values of `extra_state`, tensors on the device of the present ones. Return
    the keys that nothing in the module accepts."""
    if not values:
        return []
    present = extra_state(module)
    values = {key: _placed(value, present.get(key)) for key, value in values.items()}
    parts = dict(module.named_modules(remove_duplicate=False))
    of_hooks = {}
    for key, value in values.items():
        owner, _, leaf = key.rpartition(".")
        part = parts.get(owner)
        plain = part is None or type(part).set_extra_state is nn.Module.set_extra_state
        if leaf != _LEAF or plain:
            of_hooks[key] = value
        else:
            assert part is not None
            part.set_extra_state(value)
    if not of_hooks:
        return []
    with torch.no_grad():
        # hooks may read the weights, which are copied to themselves
        weights = module.state_dict()
        whole = {k: v for k, v in weights.items() if isinstance(v, Tensor) and _is_dense(v)}
        result = module.load_state_dict({**whole, **of_hooks}, strict=False)
    unexpected = getattr(result, "unexpected_keys", ())
    return sorted(of_hooks.keys() & set(unexpected))


def _is_dense(tensor: Tensor) -> bool:
    """False for a tensor that cannot be written to: several elements are one in memory."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return not any(size > 1 and not stride for size, stride in pairs)


def _placed(value: Any, present: Any) -> Any:
    if isinstance(value, Tensor):
        on_device = isinstance(present, Tensor) and not present.is_cpu
        return value.to(present.device) if on_device else value
    if isinstance(value, dict):
        inside = present if isinstance(present, dict) else {}
        for key, item in value.items():
            value[key] = _placed(item, inside.get(key))
        return value
    if isinstance(value, list | tuple):
        same = isinstance(present, list | tuple) and len(present) == len(value)
        others: Sequence[Any] = present if same else [None] * len(value)
        return type(value)(_placed(a, b) for a, b in zip(value, others, strict=True))
    return value


# --- values in a checkpoint -------------------------------------------------------------------


def encode(key: str, value: Any) -> dict[str, Tensor]:
    """Return the host tensors of a value, by the last part of their names. Raises `RecipeError`,
    naming the key, for a value that no checkpoint can hold."""
    tensors: dict[str, Tensor] = {}

    def store(tensor: Tensor) -> int:
        tensors[str(len(tensors))] = tensor.contiguous()
        return len(tensors) - 1

    text = strict_json.dump(_packed(value, key, store, 0))
    return {_JSON: _as_tensor(text), **tensors}


def _packed(value: Any, where: str, store: Callable[[Tensor], int], depth: int) -> Any:
    kind = type(value)
    if depth > _MAX_DEPTH:
        raise RecipeError(f"{where} is nested deeper than {_MAX_DEPTH} levels. {_ADVICE}")
    if kind in _SCALARS:
        return value
    if isinstance(value, Tensor):
        if why := _unstorable(value):
            raise RecipeError(f"{where} is a tensor that no checkpoint can hold: {why}. {_ADVICE}")
        return {"tensor" if value.is_cpu else _ON_DEVICE: store(value.detach().cpu())}
    for name, known in _BYTES.items():
        if kind is known:
            raw = value.getvalue() if isinstance(value, io.BytesIO) else value
            return {name: store(_as_tensor(raw))}
    for name, known in _PLAIN.items():
        if kind is not known:
            continue
        if isinstance(value, dict):
            for each in value:
                if type(each) not in _SCALARS:
                    raise RecipeError(
                        f"{where} has the key {each!r:.80} of the type {type(each).__name__}, "
                        f"which no checkpoint can hold. {_ADVICE}"
                    )
            pairs = value.items()
            return {
                name: [[k, _packed(v, f"{where}[{k!r:.80}]", store, depth + 1)] for k, v in pairs]
            }
        items = enumerate(value)
        return {name: [_packed(each, f"{where}[{n}]", store, depth + 1) for n, each in items]}
    raise RecipeError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which no checkpoint can hold: no "
        f"pickle is written. {_ADVICE}".replace("builtins.", "")
    )


def _unstorable(tensor: Tensor) -> str:
    if hasattr(tensor, "placements"):
        return "it is sharded over ranks"
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return f"its layout is {tensor.layout}, or it is quantized"
    if tensor.dtype not in safetensors.DTYPES.values():
        return f"safetensors have no {tensor.dtype}"
    return "it has no elements yet (device meta)" if tensor.is_meta else ""


def _as_tensor(raw: bytes | bytearray) -> Tensor:
    if not raw:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def digest(encoded: Mapping[str, Tensor]) -> int:
    """Return a number of 62 bits that differs for other values."""
    found = hashlib.sha256()
    for name, tensor in encoded.items():
        found.update(f"{name}/{tensor.dtype}{tuple(tensor.shape)}".encode())
        found.update(memory(tensor))
    return int.from_bytes(found.digest()[:8], "big") >> 2


def _raw(tensor: Tensor) -> bytes:
    return bytes(memory(tensor))


def extra_key(name: str) -> str | None:
    """Return the key of a stored tensor of extra state; None for another name."""
    head, _, rest = name.partition("/")
    if head != EXTRA and not head.startswith(f"{EXTRA}."):
        return None
    return rest.rpartition("/")[0]


def stored_keys(names: Iterable[str]) -> dict[str, set[int]]:
    """Return the keys of the extra state among names of the kind `state`, each with the ranks whose
    values are stored."""
    found: dict[str, set[int]] = {}
    for name in names:
        if (key := extra_key(name)) is not None:
            rank = name.partition("/")[0].removeprefix(EXTRA).removeprefix(".") or "0"
            if rank.isascii() and rank.isdigit():
                found.setdefault(key, set()).add(int(rank))
    return found


def read_extra_state(
    reader: Reader, device: torch.device, rank: int = 0, size: int = 1
) -> dict[str, Any]:
    """Read the values of a rank among `size` ranks, if as many saved their own, or else rank 0's.
    Raises `CheckpointDamaged` for a malformed entry."""
    others, values = set(range(1, size)), {}
    for key, ranks in stored_keys(reader.names("state")).items():
        chosen = rank if rank in ranks and ranks - {0} == others else 0
        if chosen in ranks:
            values[key] = decode(reader, key, chosen, device)
    return values


def decode(reader: Reader, key: str, rank: int, device: torch.device) -> Any:
    """Read the value that a rank saved; tensors that were on a device are put on `device`. Raises
    `CheckpointDamaged`, naming the entry, for entries that `encode` cannot have made."""
    where = f"{EXTRA}.{rank}/{key}" if rank else f"{EXTRA}/{key}"
    stored = set(reader.names("state"))

    def fetch(part: Any, as_bytes: bool = False) -> Tensor:
        name = f"{where}/{part}"
        if name not in stored:
            raise CheckpointDamaged(f"state {name!r:.200} is missing in the checkpoint")
        tensor = reader.read("state", name)
        if as_bytes and (tensor.dtype != torch.uint8 or tensor.dim() != 1):
            shown = f"{tensor.dtype}{tuple(tensor.shape)}"
            raise CheckpointDamaged(f"state {name!r:.200} is {shown}, and must be bytes")
        return tensor

    text = _raw(fetch(_JSON, True))
    packed = strict_json.parse(text, f"state {where}/{_JSON}", max_depth=4 * _MAX_DEPTH)

    def unpacked(packed: Any) -> Any:
        if type(packed) in _SCALARS:
            return packed
        if isinstance(packed, dict) and len(packed) == 1:
            ((name, value),) = packed.items()
            if name in ("tensor", _ON_DEVICE) and type(value) is int:
                return fetch(value).to(device) if name == _ON_DEVICE else fetch(value)
            if name in _BYTES and type(value) is int:
                return _BYTES[name](_raw(fetch(value, True)))
            if name in ("list", "tuple") and isinstance(value, list):
                return _PLAIN[name](map(unpacked, value))
            if name in _PLAIN and isinstance(value, list) and all(map(_is_pair, value)):
                return _PLAIN[name]((key, unpacked(item)) for key, item in value)
        raise CheckpointDamaged(
            f"state {where!r:.200} holds {packed!r:.80}, which is no stored value"
        )

    return unpacked(packed)


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and type(value[0]) in _SCALARS
