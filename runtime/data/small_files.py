"""Reads small files with limits: configuration, indexes, states.

A file may come from a stranger. So pipes, which would block, and devices, which have no end, are
refused. So are files that are too large for their purpose, and texts that grow when they are
parsed.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["MAX_BYTES", "PARSERS", "open_regular", "read_json", "read_table", "read_text"]

MAX_BYTES = 16 << 20
_MAX_ITEMS = 1_000_000
"""Maximum number of lists, tables and their items; an aliased value counts each time."""
_MAX_DEPTH = 64
_READ_AT_ONCE = 1 << 16
_MAX_DIGITS = 1000
_MAX_SLOW_BYTES = 1 << 18
"""Maximum size of YAML and TOML in bytes. Their parsers are written in Python and need a second or
two for this size.
"""
_TOML_KEY = re.compile(r"""(?<![\w"'-])(?:(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){64}""")
"""A key with more than `_MAX_DEPTH` parts, for which the parser takes quadratic time."""


@contextmanager
def open_regular(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a regular file, or a link to one, to read bytes. Raises `OSError`, also for any other
    kind of file."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        yield file


def read_text(path: str | os.PathLike[str], max_bytes: int = MAX_BYTES) -> str:
    """Read a whole text file. Raises `OSError`, also for a larger file, and `ValueError` for a file
    that is not UTF-8."""
    raw = bytearray()
    with open_regular(path) as file:
        # do not rely on the file's size, which may grow, and which some system files lack
        while len(raw) <= max_bytes and (block := file.read(_READ_AT_ONCE)):
            raw += block
    if len(raw) > max_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {max_bytes} bytes", str(path))
    return raw.decode("utf-8")


def read_json(path: str | os.PathLike[str], max_bytes: int = MAX_BYTES) -> Any:
    """Read the value in a JSON file. Raises `OSError`, and `ValueError` for invalid JSON, and for
    values that are nested too deeply or hold too many items."""
    return _json(read_text(path, max_bytes))


def read_table(path: Path, default: str = ".json") -> Any:
    """Read the value in a file of JSON, YAML or TOML, by the file's suffix, or else the suffix
    `default`. Raises as `read_json` does, and `ImportError` if a package is missing."""
    parse = PARSERS.get(path.suffix.lower(), PARSERS[default])
    return parse(read_text(path, MAX_BYTES if parse is _json else _MAX_SLOW_BYTES))


def _json(text: str) -> Any:
    if sum(map(text.count, ",[{")) > _MAX_ITEMS:
        raise ValueError(f"it holds more than {_MAX_ITEMS} items")
    return _not_deep(json.loads, text)


def _toml(text: str) -> Any:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # type: ignore[import-not-found]
    if found := _TOML_KEY.search(text):
        raise ValueError(f"the key {found[0]:.40}... has more than {_MAX_DEPTH} parts")
    return _not_deep(tomllib.loads, text)


def _yaml(text: str) -> Any:
    import yaml

    def load(text: str) -> Any:
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _check_aliases(node)
            return loader.construct_document(node)
        finally:
            loader.dispose()

    try:
        return _not_deep(load, text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


PARSERS: Mapping[str, Callable[[str], Any]] = {
    ".toml": _toml,
    ".yaml": _yaml,
    ".yml": _yaml,
    ".json": _json,
}
"""The parsers by a file's suffix. Each raises `ValueError`."""


def _check_aliases(root: Any) -> None:
    """Raises `ValueError` for a YAML document that contains itself, or that is too large when
    aliases are expanded."""
    sizes: dict[int, int] = {}
    path, above = [(root, iter(_nodes_in(root)))], {id(root)}
    totals = [1]
    while path:
        node, others = path[-1]
        inner = next(others, None)
        if inner is None:
            path.pop()
            above.remove(id(node))
            sizes[id(node)] = totals.pop()
            if totals:
                totals[-1] += sizes[id(node)]
        elif id(inner) in above:
            raise ValueError("an alias refers to a value that contains it")
        elif id(inner) in sizes:
            totals[-1] += sizes[id(inner)]
        else:
            path.append((inner, iter(_nodes_in(inner))))
            above.add(id(inner))
            totals.append(1)
        if totals and totals[-1] > _MAX_ITEMS:
            raise ValueError(f"with its aliases it holds more than {_MAX_ITEMS} items")


def _nodes_in(node: Any) -> list[Any]:
    if node.id == "mapping":
        return [part for pair in node.value for part in pair]
    if node.id == "sequence":
        return list(node.value)
    if len(node.value) > _MAX_DIGITS and node.tag.endswith((":int", ":float")):
        raise ValueError(f"the number {node.value:.40}... has more than {_MAX_DIGITS} digits")
    return []


def _not_deep(parse: Callable[[str], Any], text: str) -> Any:
    """Parse the text. Raises `ValueError` for values that are nested too deeply, and for numbers
    too long for Python to print.
    """
    try:
        value = parse(text)
    except RecursionError as error:
        raise ValueError(f"it is nested deeper than {_MAX_DEPTH} levels") from error
    waiting = [(value, 0)]
    while waiting:
        inner, depth = waiting.pop()
        if depth > _MAX_DEPTH:
            raise ValueError(f"it is nested deeper than {_MAX_DEPTH} levels")
        if isinstance(inner, dict):
            waiting += [(part, depth + 1) for pair in inner.items() for part in pair]
        elif isinstance(inner, list | tuple | set):
            waiting += [(part, depth + 1) for part in inner]
        elif isinstance(inner, int) and inner.bit_length() > 4 * _MAX_DIGITS:
            raise ValueError(f"a number has more than {_MAX_DIGITS} digits")
    return value
