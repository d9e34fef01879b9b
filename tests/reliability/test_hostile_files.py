"""Small hostile files: configurations, indexes of tokens, tar shards.

Each must be refused at once, in little memory, by an error of drivetrain. See `test_hostile` for
checkpoints.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from drivetrain.cli.data.documents import documents
from drivetrain.cli.settings.config_files import read_config_files
from drivetrain.data.small_files import read_table
from drivetrain.data.tar_shards import TarShards
from drivetrain.data.token_shards import INDEX, TokenShards
from drivetrain.kernel.errors import DataError, UsageError

SECONDS = 5


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    """Bound the seconds of the processor, which do not depend on what else the machine does. A test
    that waits for ever is ended by its time-out.
    """
    start = time.process_time()
    yield
    assert time.process_time() - start < SECONDS


def fifo(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def huge(path: Path) -> None:
    """Make a large file that takes no room on the disk."""
    path.touch()
    os.truncate(path, 1 << 40)


def text(content: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(content) and None


def doubling(first: str, line: str) -> str:
    """Return a text of thirty lines, each of which doubles the one before."""
    return "\n".join([first, *(line.format(n=n + 1, o=n) for n in range(30))])


CONFIGURATIONS: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "a pipe": ("a.toml", fifo, "regular file"),
    "no end": ("a.yaml", endless, "regular file"),
    "no end, JSON": ("a.json", endless, "regular file"),
    "too large": ("a.json", huge, "larger than"),
    "too large YAML": ("a.yaml", huge, "larger than"),
    "aliases": ("a.yaml", text(doubling("x0: &x0 [a]", "x{n}: &x{n} [*x{o}, *x{o}]")), "aliases"),
    "merged": (
        "a.yaml",
        text(doubling("x0: &x0 {a: 1}", "x{n}: &x{n} {{<<: [*x{o}, *x{o}]}}")),
        "aliases",
    ),
    "itself": ("a.yaml", text("&a {x: *a}"), "alias"),
    "itself, in a list": ("a.yaml", text("x: &a [1, [*a]]"), "alias"),
    "deep YAML": ("a.yaml", text("[" * 100_000), "nested"),
    "a long number": ("a.yaml", text("x: 0x" + "f" * 200_000), "digits"),
    "base 60": ("a.yaml", text("x: 1" + ":1" * 100_000), "digits"),
    "a long key": ("a.toml", text(".".join("a" * 20_000) + " = 1"), "parts"),
    "a long header": ("a.toml", text("[" + " . ".join(["'a'"] * 20_000) + "]\nb = 1"), "parts"),
    "deep TOML": ("a.toml", text("x = " + "[" * 100_000), "nested"),
    "hexadecimal": ("a.toml", text("x = 0x" + "f" * 200_000), "digits"),
    "deep JSON": ("a.json", text("[" * 1_000_000), "nested"),
    "nested JSON": ("a.json", text('{"a": ' * 200 + "1" + "}" * 200), "nested"),
    "many items": ("a.json", text("[" + "[]," * 2_000_000 + "[]]"), "items"),
    "no text": ("a.json", lambda path: path.write_bytes(b"\xff\xfe") and None, "decode"),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_configuration_is_refused(name: str, tmp_path: Path) -> None:
    file, make, why = CONFIGURATIONS[name]
    make(tmp_path / file)
    with pytest.raises(UsageError, match=why) as caught:
        read_config_files([tmp_path / file])
    assert len(str(caught.value)) < 1000


def test_anchors_and_dotted_keys_are_no_attack(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("base: &base {lr: 0.1}\noptimizer: {<<: *base, name: x}\nother: *base\n")
    assert read_table(path)["optimizer"] == {"lr": 0.1, "name": "x"}
    path = tmp_path / "a.toml"
    key = ".".join("a" * 40)
    path.write_text(f"{key} = 'a sentence. And one. ' # see. here.\n")
    assert read_config_files([path]).layers[0][1] == {key: "a sentence. And one. "}


# --- tokens and texts ---------------------------------------------------------------------------


@pytest.mark.parametrize("make", [fifo, endless, huge, text("[" * 1_000_000)])
def test_an_index_of_tokens_is_refused(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / INDEX)
    with pytest.raises(DataError, match="cannot be read"):
        TokenShards(tmp_path, 4)


@pytest.mark.parametrize("make", [fifo, endless])
@pytest.mark.parametrize("tokens", [4, 1])
def test_a_shard_of_tokens_is_refused(
    make: Callable[[Path], None], tokens: int, tmp_path: Path
) -> None:
    """Replace a shard while it is open; require the refusal."""
    index = {"format": 1, "dtype": "uint16", "shards": [{"tokens": 4, "crc32": 0}]}
    (tmp_path / INDEX).write_text(json.dumps(index))
    shard = tmp_path / "tokens-00000.bin"
    shard.write_bytes(bytes(8))
    opened = TokenShards(tmp_path, tokens)
    shard.unlink()
    make(shard)
    with pytest.raises(DataError, match="regular file"):
        TokenShards(tmp_path, tokens)
    for read in (lambda: opened[0], opened.damaged):
        with pytest.raises(OSError, match="regular file"):
            read()


def test_a_text_that_is_replaced_by_a_pipe_is_refused(tmp_path: Path) -> None:
    for name in ("a.txt", "b.jsonl", "c.txt.gz"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(DataError, match="regular file"):
            list(documents(tmp_path / name, 0, "text", by_line=False))
    (tmp_path / "d.txt.gz").write_bytes(b"no gzip")
    with pytest.raises(DataError, match="cannot be read"):
        list(documents(tmp_path / "d.txt.gz", 0, "text", by_line=False))


# --- tar shards ---------------------------------------------------------------------------------


def header(name: str = "a.txt", kind: bytes = tarfile.REGTYPE, size: int = 0) -> bytes:
    """Return a header block that claims `size` bytes, with a valid checksum."""
    made = tarfile.TarInfo(name)
    made.type = kind
    block = bytearray(made.tobuf(tarfile.GNU_FORMAT))
    field = (1 << 95) | size if size >= 0 else (1 << 96) + size
    block[124:136] = field.to_bytes(12, "big")
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


SIZES = {"terabytes": 1 << 42, "more than any": 1 << 80, "below 0": -512}
TARS = {
    f"{kind}, {size}": header(kind=code, size=claimed)
    for kind, code in (
        ("a file", tarfile.REGTYPE),
        ("a folder", tarfile.DIRTYPE),
        ("notes", tarfile.XHDTYPE),
        ("notes on all", tarfile.XGLTYPE),
        ("a long name", tarfile.GNUTYPE_LONGNAME),
        ("a sparse file", tarfile.GNUTYPE_SPARSE),
    )
    for size, claimed in SIZES.items()
} | {
    "notes on notes": header(kind=tarfile.XHDTYPE) * 20_000,
    "a number that is none": b"a.txt".ljust(124, b"\0") + b"99999999999\0" + bytes(376),
}


def tar_of(*names: str) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for name in names:
            made = tarfile.TarInfo(name)
            made.size = 3
            tar.addfile(made, io.BytesIO(b"abc"))
    return raw.getvalue()


@pytest.mark.parametrize("name", TARS)
@pytest.mark.parametrize("first", [b"", tar_of("first.txt")[:1024]], ids=["alone", "after another"])
def test_a_tar_shard_is_refused(name: str, first: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(first + TARS[name] + bytes(1024))
    with pytest.raises(DataError) as caught:
        list(TarShards([path]))
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("make", [fifo, endless])
def test_a_tar_shard_that_is_no_file_is_refused(make: Any, tmp_path: Path) -> None:
    make(tmp_path / "a.tar")
    with pytest.raises(DataError, match="regular file"):
        list(TarShards([tmp_path / "a.tar"]))


def test_files_with_long_names_are_read(tmp_path: Path) -> None:
    name = "folder/" * 30 + "a.txt"
    (tmp_path / "a.tar").write_bytes(tar_of(name, name.replace("a.txt", "b.txt")))
    assert [each["txt"] for each in TarShards([tmp_path / "a.tar"])] == [b"abc", b"abc"]
