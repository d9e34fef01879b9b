"""A tokenizer of the transformers or the tokenizers library."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...kernel.errors import DataError
from .documents import imported

__all__ = ["Tokenizer", "load_tokenizer"]


@dataclass(frozen=True)
class Tokenizer:
    """A converter of texts to tokens."""

    encode: Callable[[Sequence[str]], Sequence[Sequence[int]]]
    num_tokens: int
    """One more than the largest token."""
    end: int | None
    """The token after each document; None: no token."""
    digest: str
    """Digest of the tokenizer's files."""


def load_tokenizer(path: Path, end: str | None) -> Tokenizer:
    """Load a folder for transformers' AutoTokenizer, or a JSON file of tokenizers. `end`: the token
    after each document; None: the tokenizer's own; empty: none. Raises `DataError`."""
    if path.is_dir():
        return _of_folder(path, end)
    if path.is_file():
        return _of_file(path, end)
    raise DataError(
        f"there is no tokenizer {path}: give a folder for transformers' AutoTokenizer, or a "
        "tokenizer.json"
    )


def _of_folder(path: Path, end: str | None) -> Tokenizer:
    transformers = imported("transformers", "drivetrain[hf]")
    try:
        found = transformers.AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:
        raise DataError(f"transformers finds no tokenizer in {path}: {error}") from error
    wanted = found.eos_token if end is None else end

    def encode(texts: Sequence[str]) -> Any:
        return found(list(texts), add_special_tokens=False, verbose=False)["input_ids"]

    vocabulary = found.get_vocab()
    number = _end_number(path, wanted, vocabulary)
    return Tokenizer(encode, max(vocabulary.values()) + 1, number, _digest(sorted(path.iterdir())))


def _of_file(path: Path, end: str | None) -> Tokenizer:
    tokenizers = imported("tokenizers", "tokenizers")
    try:
        found = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        raise DataError(f"{path} is no tokenizer: {error}") from error
    found.no_truncation()
    found.no_padding()

    def encode(texts: Sequence[str]) -> Any:
        return [one.ids for one in found.encode_batch(list(texts), add_special_tokens=False)]

    vocabulary = found.get_vocab(with_added_tokens=True)
    number = _end_number(path, end, vocabulary)
    return Tokenizer(encode, max(vocabulary.values()) + 1, number, _digest([path]))


def _end_number(path: Path, end: str | None, vocabulary: dict[str, int]) -> int | None:
    if end is None:
        raise DataError(
            f"{path} does not say which token ends a document: give --end TOKEN, or --end '' for "
            "documents that follow each other without one"
        )
    if end and end not in vocabulary:
        raise DataError(f"{path} has no token {end!r} to end documents with: give another --end")
    return vocabulary[end] if end else None


def _digest(files: Sequence[Path]) -> str:
    found = hashlib.sha256()
    for path in files:
        if path.is_file():
            found.update(path.name.encode() + b"\0" + path.read_bytes())
    return found.hexdigest()
