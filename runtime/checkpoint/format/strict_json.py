"""A strict reader and writer of JSON: text that two readers could understand differently is
refused.

It also stores the non-finite floats that JSON lacks, as `{"$float": "nan"}`, so that a NaN metric
is read back as NaN.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import Any, TypeAlias

from ...kernel.errors import CheckpointDamaged

__all__ = ["MAX_ITEMS", "check", "dump", "num_items", "parse"]

MAX_ITEMS = 3_000_000
"""Maximum number of objects, lists and their items in a document. Each takes some hundred bytes of
memory when it is parsed, and two or three bytes in the file.
"""
_FLOAT = "$float"
_Where: TypeAlias = "tuple[_Where, str | int] | None"
"""A place in a value: the place of its container, and its key there."""
_STRING = re.compile(rb'"[^"]*"')
_SQUARE = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def dump(value: Any) -> bytes:
    """Return canonical bytes: sorted keys, ASCII. Raises `TypeError`, naming the place, for
    anything that would not be read back unchanged. Tuples are read back as lists."""
    packed = _pack(value, None)
    return json.dumps(packed, sort_keys=True, indent=1, allow_nan=False).encode()


def check(value: Any) -> None:
    """Raises the `TypeError` that `dump` would."""
    _pack(value, None)


def parse(raw: bytes, where: str, *, max_depth: int = 64) -> Any:
    """Parse the value in `raw`; `where` names its file in errors.

    Raises `CheckpointDamaged` for anything but strict UTF-8 JSON: duplicate keys, NaN, Infinity,
    numbers that overflow, nesting beyond `max_depth` and more than `MAX_ITEMS` are all refused.
    """
    if (items := num_items(raw)) > MAX_ITEMS:
        raise CheckpointDamaged(f"{where}: holds about {items} items, and {MAX_ITEMS} are read")
    try:
        value = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_object,
            parse_float=_finite,
            parse_constant=_finite,
        )
        _check_depth(raw, max_depth)
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"{where}: not valid JSON: {error}") from error
    return value


def num_items(raw: bytes) -> int:
    """Return an upper bound of the number of objects, lists and their items in a text."""
    return sum(map(raw.count, (b",", b"[", b"{")))


def _pack(value: Any, where: _Where) -> Any:
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_FLOAT: str(float(value))}
    if isinstance(value, list | tuple):
        return [_pack(item, (where, index)) for index, item in enumerate(value)]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str) or key.startswith("$"):
                raise TypeError(
                    f"{_named(where)} has the key {key!r:.200}: use strings that do not start "
                    "with $"
                )
        return {key: _pack(item, (where, key)) for key, item in value.items()}
    raise TypeError(
        f"{_named(where)} is a {type(value).__name__}: use JSON types, such as float(x)"
    )


def _named(where: _Where) -> str:
    """Return the path to a value. It is built only for an error, since keys may be long and values
    deeply nested."""
    keys: list[str] = []
    while where is not None:
        where, key = where
        keys.append(f"[{key!r:.80}]")
    return f"value{''.join(reversed(keys)):.400}"


def _object(pairs: list[tuple[str, Any]]) -> Any:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"duplicate key {twice!r:.200}")
    if _FLOAT in found:
        if len(found) > 1 or found[_FLOAT] not in ("nan", "inf", "-inf"):
            raise ValueError(f"{_FLOAT} must be nan, inf or -inf, not {found!r:.200}")
        return float(found[_FLOAT])
    return found


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text:.40} is not a JSON number")
    return value


def _check_depth(raw: bytes, max_depth: int) -> None:
    """Check the nesting of valid JSON. Without strings only brackets matter, and innermost pairs
    are removed again and again. Scanning the text is many times quicker than scanning the value.
    """
    unescaped = raw.replace(rb"\\", b"").replace(rb"\"", b"")
    brackets = _STRING.sub(b"", unescaped).translate(_SQUARE, _NO_BRACKETS)
    for _ in range(max_depth):
        brackets = brackets.replace(b"[]", b"")
    if brackets:
        raise ValueError(f"nested deeper than {max_depth} levels")
