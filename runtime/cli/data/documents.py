"""The texts to tokenize: documents in files of several kinds, each with the position after it.

A position is a number: reading resumes there without the documents before.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...data.small_files import open_regular
from ...kernel.errors import DataError

__all__ = ["Document", "documents", "find_inputs", "imported"]

Document = tuple[int, str]
"""The position of the next document, and the text."""

_MAX_BYTES = 1 << 30
"""Most bytes of one document."""
_COLUMNS = (".parquet",)
_LINES = (".jsonl", ".ndjson")
_TEXTS = (".txt", ".md", ".text")
_SAVED, _SPLITS = "state.json", "dataset_dict.json"
"""Files that mark a folder as written by the datasets library."""


def find_inputs(paths: list[Path]) -> list[Path]:
    """Return the files and data sets below these, in an order that does not depend on the machine.
    Raises `DataError` for a path that holds none."""
    found: list[Path] = []
    for path in paths:
        inside = list(_inputs_below(path))
        if not inside:
            raise DataError(
                f"{path} holds no {', '.join(_kinds())} (or those with .gz): nothing to read"
            )
        found += inside
    if len(set(found)) != len(found):
        twice = next(path for path in found if found.count(path) > 1)
        raise DataError(f"{twice} is given twice")
    return found


def documents(path: Path, start: int, field: str, by_line: bool) -> Iterator[Document]:
    """Yield the documents of one input, from a position on. Raises `DataError`, naming the
    position, for bytes that are not text.
    """
    if path.is_dir():
        return _of_data_set(path, start, field)
    suffix = _suffix(path)
    if suffix in _COLUMNS:
        return _of_parquet(path, start, field)
    if suffix in _LINES:
        return _of_lines(path, start, lambda line, where: _json_text(line, where, field))
    if by_line:
        return _of_lines(path, start, _decoded)
    return _whole(path, start)


def _kinds() -> tuple[str, ...]:
    return (*_TEXTS, *_LINES, *_COLUMNS)


def _suffix(path: Path) -> str:
    return path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix


def _inputs_below(path: Path) -> Iterator[Path]:
    if path.is_file():
        if _suffix(path) not in _kinds():
            raise DataError(f"{path} is none of {', '.join(_kinds())} (or those with .gz)")
        yield path
    elif (path / _SPLITS).is_file():
        splits = ", ".join(sorted(str(each.parent) for each in path.glob(f"*/{_SAVED}")))
        raise DataError(f"{path} is a data set of several splits; give one of {splits}")
    elif (path / _SAVED).is_file():
        yield path
    elif path.is_dir():
        for inside in sorted(path.iterdir()):
            if inside.is_dir() or _suffix(inside) in _kinds():
                yield from _inputs_below(inside)
    else:
        raise DataError(f"there is no {path}")


@contextmanager
def _opened(path: Path) -> Iterator[io.BufferedIOBase]:
    try:
        with open_regular(path) as file:
            yield gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file  # type: ignore[misc]
    except (OSError, EOFError, zlib.error) as error:  # gzip.BadGzipFile is one of them
        raise DataError(f"{path} cannot be read: {error}") from error


def _limited(raw: bytes, where: str) -> bytes:
    """Return the bytes. Raises `DataError` for more than a document may have."""
    if len(raw) > _MAX_BYTES:
        raise DataError(
            f"{where} holds a document of more than {_MAX_BYTES} bytes; split it into documents"
        )
    return raw


def _decoded(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8: {error}") from error


def _whole(path: Path, start: int) -> Iterator[Document]:
    if not start:
        with _opened(path) as file:
            yield 1, _decoded(_limited(file.read(_MAX_BYTES + 1), str(path)), str(path))


def _of_lines(path: Path, start: int, text_of: Callable[[bytes, str], str]) -> Iterator[Document]:
    with _opened(path) as file:
        file.seek(start)
        place = start
        while line := file.readline(_MAX_BYTES + 1):
            _limited(line, f"{path}, at byte {place},")
            place += len(line)
            if line.strip():
                yield place, text_of(line.rstrip(b"\r\n"), f"{path}, at byte {place - len(line)},")


def _json_text(line: bytes, where: str, field: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON: {error}") from error
    return _checked(value, where, field)


def _checked(value: Any, where: str, field: str) -> str:
    if isinstance(value, dict) and isinstance(value.get(field), str):
        return str(value[field])
    seen = ", ".join(map(str, value)) if isinstance(value, dict) else type(value).__name__
    raise DataError(f"{where} has no text {field!r} (it has {seen:.200}): give --field")


def _of_parquet(path: Path, start: int, field: str) -> Iterator[Document]:
    parquet = imported("pyarrow.parquet", "pyarrow")
    try:
        file = parquet.ParquetFile(path)
    except Exception as error:
        raise DataError(f"{path} is not Parquet: {error}") from error
    with file:
        if field not in file.schema_arrow.names:
            seen = ", ".join(file.schema_arrow.names)
            raise DataError(f"{path} has no column {field!r} (it has {seen:.200}): give --field")
        first = 0
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if first + rows > start:
                at = first
                for batch in file.iter_batches(1024, [group], [field]):
                    for text in batch.column(0).to_pylist():
                        at += 1
                        if at > start:
                            yield at, _checked({field: text}, f"{path}, row {at - 1},", field)
            first += rows


def _of_data_set(path: Path, start: int, field: str) -> Iterator[Document]:
    datasets = imported("datasets", "datasets")
    found = datasets.load_from_disk(str(path))
    for row in range(start, len(found)):
        yield row + 1, _checked(found[row], f"{path}, row {row},", field)


def imported(module: str, package: str) -> Any:
    """Import a module of an optional package. Raises `DataError`, with how to install it."""
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError as error:
        raise DataError(f"this needs {package}: pip install {package}") from error
