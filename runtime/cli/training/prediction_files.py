"""Predictions as files: a row for each sample, written chunk by chunk."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
from torch import Tensor

from ...checkpoint.storage.local import beside
from ...kernel.errors import OutputError, RecipeError
from ...trainer.outputs import leaves
from ...trainer.predictions import Chunk

__all__ = ["INDEX", "check_output", "prediction_file"]

INDEX = "index"
"""The column of the sample's position in the data."""
OUTPUT = "output"
"""The column of a model that returns one tensor."""
_FORMATS = (".parquet", ".jsonl")
_ROW_GROUP = 16 * 2**20
"""Least bytes of a row group of Parquet; small groups make reading slow."""

Write = Callable[[int, dict[str, Any]], None]
"""Takes the first index, and an array of rows for each column."""


def check_output(path: Path) -> None:
    """Raises `OutputError` for a file that cannot be written."""
    if path.suffix not in _FORMATS:
        raise OutputError(f"--out {path} must end in {' or '.join(_FORMATS)}")
    if path.is_dir():
        raise OutputError(f"--out {path} is a folder; give a file in it")
    if not path.parent.is_dir():
        raise OutputError(f"--out {path} cannot be written: there is no folder {path.parent}")
    if path.suffix == ".parquet":
        _pyarrow()


@contextmanager
def prediction_file(path: Path) -> Iterator[Callable[[Chunk], dict[str, str]]]:
    """Return a function that writes a chunk and returns the type of each column. The whole file
    appears when the block ends.
    """
    opened = _parquet if path.suffix == ".parquet" else _jsonl
    with beside(path) as temporary, opened(temporary) as write:

        def take(chunk: Chunk) -> dict[str, str]:
            columns = _columns(chunk)
            write(chunk.first, columns)
            return {name: f"{array.dtype}{[*array.shape[1:]]}" for name, array in columns.items()}

        yield take


def _columns(chunk: Chunk) -> dict[str, Any]:
    """Return the outputs as arrays by name."""
    found = {path or OUTPUT: _array(tensor) for path, tensor in leaves(chunk.outputs).items()}
    if INDEX in found:
        raise RecipeError(
            f"an output is called {INDEX!r}, as the column of positions is: rename it"
        )
    return found


def _array(tensor: Tensor) -> Any:
    """Convert to NumPy. Float16 and bfloat16 are widened: most readers of files lack them."""
    narrow = tensor.is_floating_point() and tensor.element_size() < 4
    return (tensor.float() if narrow else tensor).numpy()


@contextmanager
def _jsonl(path: Path) -> Iterator[Write]:
    with open(path, "w", encoding="utf-8") as file:

        def write(first: int, columns: dict[str, Any]) -> None:
            for index, row in enumerate(zip(*map(_plain, columns.values()), strict=True), first):
                record = {INDEX: index, **dict(zip(columns, row, strict=True))}
                file.write(json.dumps(record, allow_nan=False) + "\n")

        yield write


def _plain(array: Any) -> Any:
    """Convert to lists for JSON; numbers that are not finite become null."""
    finite = numpy.isfinite(array)
    if not finite.all():
        array = array.astype(object)
        array[~finite] = None
    return array.tolist()


@contextmanager
def _parquet(path: Path) -> Iterator[Write]:
    pyarrow = _pyarrow()
    from pyarrow.parquet import ParquetWriter

    writer: Any = None
    waiting: list[Any] = []

    def flush() -> None:
        nonlocal writer
        table = pyarrow.concat_tables(waiting)
        waiting.clear()
        writer = writer or ParquetWriter(path, table.schema)
        writer.write_table(table)

    def write(first: int, columns: dict[str, Any]) -> None:
        (count,) = {len(array) for array in columns.values()}
        arrays = {INDEX: pyarrow.array(range(first, first + count))}
        arrays |= {name: _nested(pyarrow, array) for name, array in columns.items()}
        waiting.append(pyarrow.table(arrays))
        if sum(table.nbytes for table in waiting) >= _ROW_GROUP:
            flush()

    try:
        yield write
        if waiting:
            flush()
    finally:
        if writer is not None:
            writer.close()


def _nested(pyarrow: Any, array: Any) -> Any:
    """Convert to lists of lists, a level for each dimension beyond the first."""
    found = pyarrow.array(array.reshape(-1))
    for dimension in reversed(range(1, array.ndim)):
        outer, size = math.prod(array.shape[:dimension]), array.shape[dimension]
        bounds = pyarrow.array((numpy.arange(outer + 1) * size).astype("int32"))
        found = pyarrow.ListArray.from_arrays(bounds, found)
    return found


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise OutputError(
            "a .parquet file needs pyarrow: pip install 'drivetrain[parquet]', or give a .jsonl"
        ) from error
    return pyarrow
