"""`drivetrain data tokenize`: the same tokens from every kind of file, and after a kill at any
moment.
"""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from command_line import Drive
from datasets import Dataset, DatasetDict
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from drivetrain import TokenShards
from drivetrain.cli.data.tokenize import TokenizeRequest, tokenize
from drivetrain.data.open_dataset import by_sample
from drivetrain.kernel.batches import Position
from drivetrain.kernel.errors import DataError, UsageError

WORDS = ["a", "bird", "flew", "over", "the", "old", "house", "and", "sang", "of", "rain"]
TEXTS = [" ".join(WORDS[start : start + length]) for start in range(9) for length in (1, 3, 7)]
END = len(WORDS)


def encoded(texts: list[str]) -> list[int]:
    return sum(([*(WORDS.index(word) for word in text.split()), END] for text in texts), [])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a tokenizer of both libraries, and the texts in every kind of file."""
    folder = tmp_path_factory.mktemp("made")
    words = {word: number for number, word in enumerate([*WORDS, "<end>"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "words.json"))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.save_pretrained(str(folder / "words"))
    lines = "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in TEXTS)
    (folder / "texts.jsonl").write_text(lines + "\n")
    (folder / "texts.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "lines.txt").write_bytes("\r\n\r\n".join(TEXTS).encode())
    (folder / "files").mkdir()
    for number, text in enumerate(TEXTS):
        (folder / "files" / f"{number:02}.txt").write_text(text)
    table = pyarrow.table({"id": list(range(len(TEXTS))), "text": TEXTS})
    pyarrow.parquet.write_table(table, folder / "texts.parquet", row_group_size=5)
    data = Dataset.from_dict({"text": TEXTS})
    data.save_to_disk(str(folder / "saved"))
    DatasetDict({"train": data}).save_to_disk(str(folder / "splits"))
    return folder


def request(made: Path, out: Path, name: str = "texts.jsonl", **options: Any) -> TokenizeRequest:
    given = {"tokenizer": made / "words", **options}
    return TokenizeRequest([made / name], out=out, by_line=name == "lines.txt", **given)


KINDS = ["texts.jsonl", "texts.jsonl.gz", "lines.txt", "files", "texts.parquet", "saved"]


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_file_gives_the_same_tokens(made: Path, tmp_path: Path, name: str) -> None:
    for tokenizer, end in (("words", None), ("words.json", "<end>")):
        out = tmp_path / tokenizer
        chosen = request(made, out, name, tokenizer=made / tokenizer, end=end, shard_tokens=11)
        found = tokenize(chosen)
        assert found["documents"] == len(TEXTS)
        assert found["tokens"] == len(encoded(TEXTS))
        assert found["shards"] == -(-found["tokens"] // 11)
        shards = TokenShards(out, 4)
        assert shards.tokens(0, 10**6).tolist() == encoded(TEXTS)
        assert len(shards) == len(encoded(TEXTS)) // 4
        windows = [shards[index]["input_ids"].tolist() for index in range(len(shards))]
        assert sum(windows, []) == encoded(TEXTS)[: 4 * len(shards)]
        assert not shards.damaged()
        assert not (out / "progress.json").exists()
    assert tokenize(request(made, tmp_path / "none", name, end=""))["tokens"] == len(
        encoded(TEXTS)
    ) - len(TEXTS)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


class Ended(Exception):
    pass


@settings(deadline=None, max_examples=10)
@given(
    name=st.sampled_from(KINDS),
    size=st.integers(7, 40),
    ends=st.lists(st.integers(1, 5), max_size=3),
)
def test_the_same_command_goes_on_where_it_was_ended(
    made: Path, name: str, size: int, ends: list[int]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        whole = request(made, Path(folder, "whole"), name, shard_tokens=size)
        parts = request(made, Path(folder, "parts"), name, shard_tokens=size)
        tokenize(whole)
        for count in ends:
            reported: list[str] = []

            def report(text: str, reported: list[str] = reported, count: int = count) -> None:
                reported.append(text)
                if len(reported) >= count:
                    raise Ended

            try:
                tokenize(parts, report)
            except Ended:
                (parts.out / ".tokens-00099.bin.writing").write_bytes(b"torn")
        tokenize(parts)
        (parts.out / ".tokens-00099.bin.writing").unlink(missing_ok=True)
        assert files(parts.out) == files(whole.out)


@pytest.mark.slow
def test_a_killed_command_is_resumed_by_the_same_one(
    made: Path, drive: Drive, tmp_path: Path
) -> None:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS * 8)
    (tmp_path / "many.jsonl").write_text(lines)
    words = ("data", "tokenize", "many.jsonl", "--tokenizer", made / "words", "--shard-tokens", 9)

    def kill(process: BaseProcess) -> None:
        while not (tmp_path / "parts/tokens-00003.bin").exists():
            assert process.is_alive()
            time.sleep(0.01)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)

    killed = drive(*words, "--out", "parts", meanwhile=kill)
    assert killed.code == -signal.SIGKILL
    assert drive("data", "verify", "parts").code == 2  # not whole
    ran = drive(*words, "--out", "parts", "--json")
    assert "resuming after" in ran.stderr
    assert json.loads(ran.stdout)["documents"] == len(TEXTS) * 8
    assert TokenShards(tmp_path / "parts", 1).tokens(0, 10**6).tolist() == encoded(TEXTS * 8)
    again = drive(*words, "--out", "parts")
    assert again.code == 0 and "tokens of 216 documents" in again.stdout
    assert "unaltered" in drive("data", "verify", "parts").stdout
    damaged = tmp_path / "parts/tokens-00002.bin"
    damaged.write_bytes(bytes([damaged.read_bytes()[0] ^ 1]) + damaged.read_bytes()[1:])
    broken = drive("data", "verify", "parts")
    assert broken.code == 1 and "tokens-00002.bin" in broken.stderr
    other = drive(*words, "--field", "words", "--out", "parts")
    assert other.code == 2 and "field was text, is words" in other.stderr


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path.name


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (lambda _: "absent", {}, ["there is no", "absent"]),
        (lambda made: write(made / "a.doc", ""), {}, ["a.doc", ".jsonl"]),
        (lambda made: write(made / "b.txt", b"\xff"), {}, ["b.txt", "UTF-8"]),
        (lambda made: write(made / "c.jsonl", '{"text":"a"}\n{'), {}, ["byte 13", "not JSON"]),
        (lambda made: write(made / "d.jsonl", "[1]"), {}, ["byte 0", "'text'", "list"]),
        (lambda _: "texts.jsonl", {"field": "body"}, ["'body'", "id, text", "--field"]),
        (lambda _: "texts.parquet", {"field": "id"}, ["row 0", "'id'"]),
        (lambda _: "texts.parquet", {"field": "body"}, ["'body'", "id, text"]),
        (lambda _: "splits", {}, ["splits/train"]),
        (lambda made: write(made / "e.parquet", "x"), {}, ["e.parquet", "not Parquet"]),
        (lambda made: write(made / "f.jsonl", ""), {}, ["f.jsonl", "no text"]),
        (lambda _: "texts.jsonl", {"tokenizer": Path("none")}, ["no tokenizer none"]),
        (lambda _: "texts.jsonl", {"end": "<stop>"}, ["'<stop>'", "--end"]),
    ],
)
def test_what_cannot_be_tokenized_is_named(
    made: Path, tmp_path: Path, name: Callable[[Path], str], options: Any, words: list[str]
) -> None:
    with pytest.raises(UsageError) as raised:
        tokenize(request(made, tmp_path / "out", name(made), **options))
    assert all(word in str(raised.value) for word in words), raised.value


def test_a_tokenizer_without_an_end_asks_for_one(made: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--end TOKEN"):
        tokenize(request(made, tmp_path, tokenizer=made / "words.json"))


def change_index(folder: Path, **changes: Any) -> None:
    index = json.loads((folder / "tokens.json").read_text())
    (folder / "tokens.json").write_text(json.dumps({**index, **changes}))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda out: (out / "tokens.json").unlink(), ["no tokens.json", "tokenize"]),
        (lambda out: (out / "tokens.json").write_text("{"), ["tokens.json", "cannot be read"]),
        (lambda out: change_index(out, format=2), ["not an index"]),
        (lambda out: change_index(out, dtype="int8"), ["not an index"]),
        (lambda out: change_index(out, shards=[{"tokens": -1, "crc32": 0}]), ["not an index"]),
        (lambda out: os.truncate(out / "tokens-00000.bin", 5), ["tokens-00000.bin", "5 bytes"]),
        (lambda out: (out / "tokens-00000.bin").unlink(), ["tokens-00000.bin", "No such"]),
    ],
)
def test_shards_that_are_not_whole_are_named(
    made: Path, tmp_path: Path, spoil: Callable[[Path], Any], words: list[str]
) -> None:
    tokenize(request(made, tmp_path))
    with pytest.raises(DataError, match="1000"):
        TokenShards(tmp_path, 1000)
    spoil(tmp_path)
    with pytest.raises(DataError) as raised:
        TokenShards(tmp_path, 4)
    assert all(word in str(raised.value) for word in words), raised.value


def read(data: TokenShards, start: Position, num_steps: int, readers: int) -> Any:
    steps: list[list[Any]] = [[] for _ in range(num_steps)]
    end = start
    for index in range(readers):
        loader = by_sample(
            data, global_batch=4, micro_batch=2, reader_index=index, num_readers=readers
        )
        for number, group in enumerate(loader.groups(start, num_steps)):
            for each in group.microbatches:
                steps[number] += each.batch["input_ids"][: each.num_samples].tolist()
            end = group.next
    return steps, end


def test_windows_are_shuffled_and_resumed_at_the_sample(made: Path, tmp_path: Path) -> None:
    tokenize(request(made, tmp_path, shard_tokens=10))
    data = TokenShards(tmp_path, 3)
    whole, _ = read(data, Position(), 20, readers=1)
    first, position = read(data, Position(), 7, readers=3)
    rest, _ = read(data, position, 13, readers=2)
    assert first + rest == whole
    epoch = sum(whole[: -(-len(data) // 4)], [])
    assert sorted(epoch) == sorted(data[index]["input_ids"].tolist() for index in range(len(data)))
    assert epoch != [data[index]["input_ids"].tolist() for index in range(len(data))]


BILLION = """
import json, resource, sys, time
from pathlib import Path
from drivetrain import TokenShards
from drivetrain.data.open_dataset import by_sample
from drivetrain.kernel.batches import Position
data = None
def take():
    loader = by_sample(data, global_batch=8, micro_batch=8, seed=3)
    for start in (0, 123_456, len(data) - 9):
        for group in loader.groups(Position(2, start), 1):
            assert [len(each.batch["input_ids"]) for each in group.microbatches] == [8]
def used():  # kilobytes
    words = Path("/proc/self/status").read_text().split()
    return int(words[words.index("VmData:") + 1])
data = TokenShards(sys.argv[1], 1024)
take()  # threads and caches
del data
room = (used() << 10) + (32 << 20)
resource.setrlimit(resource.RLIMIT_DATA, (room, room))
began = time.perf_counter()
data = TokenShards(sys.argv[1], 1)
take()
assert time.perf_counter() - began < 5
try:
    list(range(10**7))
except MemoryError:
    print(len(data))
"""


@pytest.mark.slow
def test_a_billion_tokens_are_opened_and_shuffled_in_32_megabytes(tmp_path: Path) -> None:
    shards = []
    for number in range(4):
        with (tmp_path / f"tokens-{number:05d}.bin").open("wb") as file:
            file.truncate(2 * 250_000_000)  # sparse
        shards.append({"tokens": 250_000_000, "crc32": 0})
    index = {"format": 1, "dtype": "uint16", "shards": shards}
    (tmp_path / "tokens.json").write_text(json.dumps(index))
    ran = subprocess.run(
        [sys.executable, "-c", BILLION, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ran.stdout == "1000000000\n", ran.stderr
