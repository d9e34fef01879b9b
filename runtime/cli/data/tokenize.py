"""`drivetrain data tokenize`: turns texts into shards of tokens (`drivetrain.data.token_shards`).

A shard gets its name when it is complete. After each shard, `progress.json` records the position
in the texts. The same command resumes there, and writes the same shards as without a pause.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy

from ...checkpoint.storage.local import LOCAL, beside
from ...data.small_files import read_json, read_text
from ...data.token_shards import INDEX, MAX_INDEX_BYTES, Shard, read_index, shard_name
from ...kernel.errors import DataError, OutputError
from .documents import documents, find_inputs
from .tokenizers import Tokenizer, load_tokenizer

__all__ = ["TokenizeRequest", "tokenize"]

PROGRESS = "progress.json"
_AT_ONCE = 256
"""Documents that are encoded together."""
_WORDS = {"uint16": "<u2", "int32": "<i4"}


@dataclass(frozen=True)
class TokenizeRequest:
    """Arguments of the command line; see `drivetrain data tokenize --help`."""

    inputs: list[Path]
    tokenizer: Path
    out: Path
    field: str = "text"
    by_line: bool = False
    end: str | None = None
    shard_tokens: int = 1 << 27


def tokenize(
    request: TokenizeRequest, report: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Tokenize, or resume an earlier call that was interrupted; return a summary. `report` receives
    lines of progress. Raises `DataError`, and `OutputError` where the folder holds other tokens."""
    inputs = find_inputs(request.inputs)
    tokenizer = load_tokenizer(request.tokenizer, request.end)
    made_of = _made_of(request, inputs, tokenizer)
    if (request.out / INDEX).exists():
        index = read_index(request.out)
        _check_same(request.out, index.get("made_of"), made_of)
        return _summary(request.out, index)
    request.out.mkdir(parents=True, exist_ok=True)
    done = _earlier(request.out, made_of)
    if done["shards"]:
        report(f"resuming after {len(done['shards'])} shards")
    shards = [Shard(**shard) for shard in done["shards"]]
    dtype = "uint16" if tokenizer.num_tokens <= 1 << 16 else "int32"
    reader = _Reader(request, inputs, tokenizer, done)
    while reader.more():
        name = shard_name(len(shards))
        shards.append(_write(request.out / name, reader, request.shard_tokens, _WORDS[dtype]))
        written = [asdict(shard) for shard in shards]
        _replace(request.out / PROGRESS, {"made_of": made_of, **reader.place(), "shards": written})
        report(f"{name}: {shards[-1].tokens} tokens")
    if not shards:
        raise DataError(f"{', '.join(map(str, request.inputs))} hold no text: no token was written")
    index = {
        "format": 1,
        "dtype": dtype,
        "tokens": sum(shard.tokens for shard in shards),
        "documents": reader.documents,
        "shards": [asdict(shard) for shard in shards],
        "made_of": made_of,
    }
    _replace(request.out / INDEX, index)
    (request.out / PROGRESS).unlink(missing_ok=True)
    return _summary(request.out, index)


class _Reader:
    """The tokens of all documents in sequence, from a position on."""

    def __init__(
        self,
        request: TokenizeRequest,
        inputs: list[Path],
        tokenizer: Tokenizer,
        done: dict[str, Any],
    ) -> None:
        self._request, self._inputs, self._tokenizer = request, inputs, tokenizer
        self._input, self._start, self._taken = done["input"], done["start"], done["taken"]
        self.documents = done["documents"]
        self._rest = self._documents()
        self._tokens: list[int] = []
        self._after: int | None = None
        self._open_next()

    def more(self) -> bool:
        """True until the last token was taken."""
        while self._after is not None and self._taken >= len(self._tokens):
            self._start, self._taken = self._after, 0
            self.documents += 1
            self._open_next()
        return self._after is not None

    def take(self, most: int) -> list[int]:
        """Return the next tokens, all of one document, and not more than `most`."""
        part = self._tokens[self._taken : self._taken + most] if self.more() else []
        self._taken += len(part)
        return part

    def place(self) -> dict[str, int]:
        """Return the position of the next token: the input, the start of its document there, and
        the number of tokens of the document that were taken.
        """
        return {
            "input": self._input,
            "start": self._start,
            "taken": self._taken,
            "documents": self.documents,
        }

    def _open_next(self) -> None:
        number, before, self._after, self._tokens = next(self._rest, (0, 0, None, []))
        if self._after is not None:
            self._input, self._start = number, before

    def _documents(self) -> Iterator[tuple[int, int, int, list[int]]]:
        """Yield the input, the positions before and after, and the tokens of each document."""
        start, request = self._start, self._request
        end = [] if self._tokenizer.end is None else [self._tokenizer.end]
        for number in range(self._input, len(self._inputs)):
            found = documents(self._inputs[number], start, request.field, request.by_line)
            before = start
            while some := list(islice(found, _AT_ONCE)):
                encoded = self._tokenizer.encode([text for _, text in some])
                for (after, _), tokens in zip(some, encoded, strict=True):
                    yield number, before, after, [*tokens, *end]
                    before = after
            start = 0


def _write(path: Path, reader: _Reader, most: int, word: str) -> Shard:
    tokens = crc32 = 0
    with beside(path) as temporary, open(temporary, "wb") as file:
        while tokens < most and (part := reader.take(most - tokens)):
            raw = numpy.asarray(part, word).tobytes()
            file.write(raw)
            tokens, crc32 = tokens + len(part), zlib.crc32(raw, crc32)
        file.flush()
        os.fsync(file.fileno())
    return Shard(tokens, crc32)


def _replace(path: Path, value: dict[str, Any]) -> None:
    with beside(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    LOCAL.sync_folder(path.parent)


def _made_of(request: TokenizeRequest, inputs: list[Path], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the settings that determine the tokens."""
    return {
        "inputs": {str(path): _fingerprint(path) for path in inputs},
        "tokenizer": tokenizer.digest,
        "field": request.field,
        "by_line": request.by_line,
        "end": tokenizer.end,
        "shard_tokens": request.shard_tokens,
    }


def _fingerprint(path: Path) -> str:
    if path.is_dir():
        try:
            text = read_text(path / "state.json")
        except (OSError, ValueError) as error:
            raise DataError(f"{path / 'state.json'} cannot be read: {error}") from error
        return hashlib.sha256(text.encode()).hexdigest()[:16]
    seen = path.stat()
    return f"{seen.st_size} bytes of {seen.st_mtime_ns}"


def _earlier(out: Path, made_of: dict[str, Any]) -> dict[str, Any]:
    path = out / PROGRESS
    if not path.exists():
        if any(out.glob("tokens-*.bin")):
            raise OutputError(
                f"{out} holds shards, and neither {INDEX} nor {PROGRESS}: give another --out"
            )
        return {"input": 0, "start": 0, "taken": 0, "documents": 0, "shards": []}
    try:
        done = read_json(path, MAX_INDEX_BYTES)
        known = {key: done[key] for key in ("input", "start", "taken", "documents", "shards")}
        then = done["made_of"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OutputError(f"{path} cannot be resumed from ({error}): give another --out") from error
    _check_same(out, then, made_of)
    return known


def _check_same(out: Path, then: Any, now: dict[str, Any]) -> None:
    then = then if isinstance(then, dict) else {}
    changed = [key for key in now if then.get(key) != now[key]]
    if changed:
        differences = "; ".join(
            f"{key} was {then.get(key)}, is {now[key]}"[:300] for key in changed
        )
        raise OutputError(
            f"{out} holds other tokens: {differences}. Give another --out, or remove it"
        )


def _summary(out: Path, index: dict[str, Any]) -> dict[str, Any]:
    return {
        "folder": str(out),
        "tokens": index["tokens"],
        "documents": index["documents"],
        "shards": len(index["shards"]),
        "dtype": index["dtype"],
    }
