"""Parses lines of JSON as the standard library does; most of them with orjson, which is faster."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import numpy as np
import orjson

__all__ = ["parsed"]

_END = "\n"
_SURROGATES = ("\\ud", "\\uD")
"""Escapes of surrogates in JSON. No page can hold a lone one."""
_DIGIT_0, _POINT = 48, 46
"""Codes of characters. Between them is only the slash, which no number has."""
_DOUBLINGS = (1, 2, 4, 8)


def parsed(lines: bytes) -> tuple[list[Any], int]:
    """Return the values of lines, and the number of lines; a malformed line has no value.

    If orjson refuses a line, as it does with NaN, the standard library parses all of them.
    """
    with suppress(ValueError, RecursionError):
        whole = b"[%b]" % lines.replace(b"\n", b",")
        if not _has_long_integer(whole):
            values = orjson.loads(whole)
            if len(values) == lines.count(b"\n") + 1:  # JSON text contains no line break
                return values, len(values)
    with suppress(ValueError, RecursionError):
        text = lines.decode()
        if not any(each in text for each in _SURROGATES):
            values = json.loads(f"[{text.replace(_END, ',')}]")
            if len(values) == text.count(_END) + 1:
                return values, len(values)
    return _one_by_one(lines)


def _has_long_integer(text: bytes) -> bool:
    """Return True if a number has 16 digits or more before its point: orjson converts integers of
    more than 64 bits to floats. `text` begins with another character."""
    codes = np.frombuffer(text, np.uint8)
    digits = codes - _DIGIT_0 < 10  # smaller codes wrap around to large numbers
    for width in _DOUBLINGS:
        digits = digits[width:] & digits[:-width]
    starts = codes - _POINT > 11  # the character before is neither a digit nor a point
    return bool((starts[: len(digits)][:-1] & digits[1:]).any())


def _one_by_one(lines: bytes) -> tuple[list[Any], int]:
    found = []
    texts = [each for each in lines.decode(errors="replace").split(_END) if each.strip()]
    for text in texts:
        try:
            value = json.loads(text)
            if any(each in text for each in _SURROGATES):
                value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
        except (ValueError, RecursionError):
            continue
        found.append(value)
    return found, len(texts)
