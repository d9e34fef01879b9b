"""Any file that is truncated, altered or forged ends in `CheckpointDamaged`, or is found by
`verify`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.checkpoint import (
    CheckpointReader,
    CheckpointStore,
    list_checkpoints,
    newest,
    read_manifest,
)
from drivetrain.checkpoint.format.safetensors import (
    DTYPES,
    Source,
    TensorFile,
    read_whole,
    write,
)
from drivetrain.kernel.errors import CheckpointDamaged
from drivetrain.kernel.shards import Box, Flat, Piece

from .fakes import piece, region_of, save


def small_file(path: Path) -> bytes:
    tensors = {"a": torch.arange(3.0), "b": torch.tensor(7, dtype=torch.int16)}
    sources = {name: Source(t.dtype, tuple(t.shape), lambda t=t: t) for name, t in tensors.items()}
    write(path, sources, {"format": "pt"})
    return path.read_bytes()


def forged(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def item(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_truncated_anywhere(tmp_path):
    raw = small_file(tmp_path / "whole")
    path = tmp_path / "torn"
    for length in range(len(raw)):
        path.write_bytes(raw[:length])
        with pytest.raises(CheckpointDamaged, match="torn: "):
            TensorFile(path)
    path.write_bytes(raw + b"\0")
    with pytest.raises(CheckpointDamaged, match="promises"):
        TensorFile(path)


def test_truncated_after_the_header_was_read(tmp_path):
    raw = small_file(tmp_path / "f")
    file = TensorFile(tmp_path / "f")
    os.truncate(tmp_path / "f", len(raw) - 6)
    with pytest.raises(CheckpointDamaged, match="within a tensor"):
        file.read("a")


def test_every_flipped_bit_is_named_by_verify(tmp_path):
    folder = save(CheckpointStore(tmp_path), 1, [[piece("a", torch.arange(3.0), Flat(0, 3))]])
    path = next(folder.glob("weights-*"))
    raw = path.read_bytes()
    for bit in range(8 * len(raw)):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        problems = CheckpointReader(folder).verify()
        assert len(problems) == 1
        assert path.name in problems[0]
    path.write_bytes(raw)
    assert CheckpointReader(folder).verify() == []


@given(st.data())
@settings(deadline=None)
def test_an_altered_header_is_refused_or_read(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("altered") / "f"
    raw = bytearray(small_file(path))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    with contextlib.suppress(CheckpointDamaged):
        file = TensorFile(path)
        for name, entry in file.entries.items():
            assert file.read(name).shape == entry.shape


@pytest.mark.parametrize(
    ("header", "data"),
    [
        (b"", b""), (b"[]", b""), (b" {}", b""), (b"{}x", b""), (b"{", b""), (b"\xff", b""),
        ({"a": item()}, b"123"), ({"a": item()}, b"12345"), ({}, b"1"),
        ({"a": item(offsets=(4, 8))}, b"12345678"),
        ({"a": item(), "b": item()}, b"1234"),
        ({"a": item(), "b": item(offsets=(2, 6))}, b"123456"),
        ({"a": item(), "b": item(offsets=(8, 12))}, bytes(12)),
        ({"a": item(offsets=(0, 1 << 70))}, b"1234"),
        ({"a": item(offsets=(4, 0))}, b"1234"), ({"a": item(offsets=(-4, 0))}, b"1234"),
        ({"a": item(offsets=(0, 4, 8))}, b"1234"), ({"a": item(offsets=(0.0, 4.0))}, b"1234"),
        ({"a": item(offsets=(False, 4))}, b"1234"), ({"a": item(shape=(True,))}, b"1234"),
        ({"a": item(shape=(2,))}, b"1234"), ({"a": item(shape=(-1, -1))}, b"1234"),
        ({"a": item(shape=(1.0,))}, b"1234"), ({"a": item(shape=("1",))}, b"1234"),
        ({"a": item(shape=(0, 1 << 62, 1 << 62), offsets=(0, 0))}, b""),
        ({"a": item(shape=(1,) * 65)}, b"1234"),
        ({"a": item(dtype="F31")}, b"1234"), ({"a": item(dtype=7)}, b"1234"),
        ({"a": item(dtype=["F32"])}, b"1234"), ({"a": item() | {"more": 1}}, b"1234"),
        ({"a": {}}, b""), ({"a": 7}, b""), ({"a": None}, b""),
        (b'{"a":' + json.dumps(item()).encode() + b',"a":' + json.dumps(item()).encode() + b"}",
         b"1234"),
        ({"__metadata__": {"a": 1}}, b""), ({"__metadata__": []}, b""),
        ({"__metadata__": None}, b""), (b'{"$float":"nan"}', b""), (b'{"a":' * 5000, b""),
    ],
    ids=repr,
)  # fmt: skip
def test_forged_headers(tmp_path, header, data):
    with pytest.raises(CheckpointDamaged, match="forged: "):
        TensorFile(forged(tmp_path / "forged", header, data))


@pytest.mark.parametrize("length", [1 << 63, (1 << 64) - 1, 100_000_001, 100])
def test_a_huge_header_length_is_not_believed(tmp_path, length):
    path = tmp_path / "huge"
    path.write_bytes(length.to_bytes(8, "little") + b"{}")
    if length == 100_000_001:
        os.truncate(path, 8 + length)  # sparse: the length fits the file, not the limit
    with pytest.raises(CheckpointDamaged, match=f"header length {length}"):
        TensorFile(path)


@pytest.mark.parametrize(
    "parts",
    [
        b"7", b"{", b'{"w#0": 7}', b'{"other": {}}', b'{"w#0": {}}', b'{"w#0": []}',
        *(
            json.dumps({"w#0": {"name": "w", "shape": [4], "flat": [0, 2]} | changes}).encode()
            for changes in (
                {"name": 7}, {"shape": 4}, {"shape": [1]}, {"shape": ["4"]}, {"shape": None},
                {"flat": [0, 3]}, {"flat": [3, 5]}, {"flat": [0]}, {"flat": [0.0, 2.0]},
                {"flat": "02"}, {"flat": [False, 2]}, {"box": [[0], [2]]}, {"more": 1},
                {"flat": [-2, 0]}, {"shape": [-2, -2]}, {"shape": [2.0, 2]}, {"shape": [True, 4]},
            )
        ),
        json.dumps({"w#0": {"name": "w", "shape": [4], "box": [[0, 0], [2, 1]]}}).encode(),
        json.dumps({"w#0": {"name": "w", "shape": [4], "box": [[3], [2]]}}).encode(),
        b'{"w#0": "\\ud800"}', "{\"\ud800\": 1}".encode("utf-8", "surrogatepass"),
        json.dumps({"w#0": {"name": "w", "shape": [4], "box": [["0"], [2]]}}).encode(),
    ],
)  # fmt: skip
def test_forged_descriptions_of_parts(tmp_path, parts):
    folder = save(CheckpointStore(tmp_path), 1, [[piece("w", torch.zeros(4), Flat(0, 2))]])
    path = next(folder.glob("weights-*"))
    header = {
        "__metadata__": {"drivetrain": parts.decode("utf-8", "surrogatepass")},
        "w#0": item(shape=(2,), offsets=(0, 8)),
    }
    forged(path, header, bytes(8))
    manifest = read_manifest(folder)
    sized = [replace(e, num_bytes=(folder / e.name).stat().st_size) for e in manifest.files]
    (folder / "manifest.json").write_bytes(replace(manifest, files=tuple(sized)).to_bytes())
    with pytest.raises(CheckpointDamaged, match=path.name):
        CheckpointReader(folder).names("weights")


def test_a_forged_shape_gets_no_memory(tmp_path):
    moon = Piece("weights", "w", torch.zeros(2), (1 << 62,), Flat(0, 2))
    reader = CheckpointReader(save(CheckpointStore(tmp_path), 1, [[moon]]))
    with pytest.raises(CheckpointDamaged, match="not stored"):
        reader.read("weights", "w")
    assert reader.read("weights", "w", Flat(0, 2)).tolist() == [0, 0]


def test_missing_short_and_linked_files(tmp_path):
    tensor = torch.arange(6.0).view(2, 3)
    store = CheckpointStore(tmp_path / "run")
    save(store, 1, [[piece("w", tensor)]])
    folder = save(store, 2, [[piece("w", tensor, Box((0, 0), (2, 2)))], [piece("v", tensor)]])
    path = next(folder.glob("weights-00001*"))
    raw = path.read_bytes()

    def check(message: str) -> None:
        assert newest(store.root).name == "checkpoint-000001"
        rejected = list_checkpoints(store.root).rejected
        assert [item.folder for item in rejected] == [folder]
        assert re.search(message, rejected[0].reason)
        assert path.name in rejected[0].reason
        reader = CheckpointReader(folder)
        assert len(reader.verify()) == 1
        with pytest.raises(CheckpointDamaged, match=message):
            reader.read("weights", "v")
        assert CheckpointReader(folder).names("state")

    path.unlink()
    check("No such file")
    path.write_bytes(raw[:-1])
    check(f"is {len(raw) - 1} bytes, and should be {len(raw)}")
    path.unlink()
    (tmp_path / "elsewhere").write_bytes(raw)
    path.symlink_to(tmp_path / "elsewhere")
    check("cannot be opened|not a regular file")  # by the reader, and by the check of files
    path.unlink()
    path.mkdir()
    check("not a regular file")
    path.rmdir()
    os.mkfifo(path)
    check("not a regular file")
    path.unlink()
    path.write_bytes(raw)
    assert newest(store.root) == folder
    assert torch.equal(CheckpointReader(folder).read("weights", "v"), region_of(tensor, None))


def test_all_dtypes_are_known_by_both_libraries(tmp_path):
    import safetensors.torch as reference

    for code, dtype in DTYPES.items():
        tensor = torch.zeros(8 * dtype.itemsize, dtype=torch.uint8).view(dtype)
        ours, theirs = tmp_path / f"ours-{code}", tmp_path / f"theirs-{code}"
        write(ours, {"t": Source(dtype, (8,), lambda tensor=tensor: tensor)}, {})
        assert TensorFile(ours).entries["t"].dtype == dtype
        if dtype in reference._TYPES.values():
            reference.save_file({"t": tensor}, theirs)
            assert TensorFile(theirs).entries["t"].dtype == dtype
        assert read_whole(ours)["t"].dtype == dtype


def test_verifying_asks_the_safetensors_package_too(tmp_path, monkeypatch):
    folder = save(
        CheckpointStore(tmp_path), 1, [[piece("w", torch.ones(2)), piece("v", torch.zeros(()))]]
    )
    assert CheckpointReader(folder).verify() == []
    monkeypatch.setitem(DTYPES, "F32", torch.int32)  # a fault of the reader and the writer alike
    assert [line.partition(": ")[2] for line in CheckpointReader(folder).verify()] == [
        "the safetensors package reads v, w otherwise"
    ]


@pytest.mark.parametrize(
    ("header", "data"),
    [
        ({"a": item(shape=(2,))}, b"1234"), ({"a": item()}, b"12345"), (b"torn", b""),
        ({"a": item(shape=(1,) * 65)}, b"1234"),
        ({"a": item(shape=(0, 1 << 62, 1 << 62), offsets=(0, 0))}, b""),
        ({"a": item(dtype="F4", shape=(2,), offsets=(0, 1))}, b"1"),
    ],
    ids=repr,
)  # fmt: skip
def test_whole_files_that_are_refused(tmp_path, header, data):
    with pytest.raises(CheckpointDamaged, match="forged: "):
        read_whole(forged(tmp_path / "forged", header, data))


def test_a_pipe_is_no_whole_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointDamaged, match="is no file"):
        read_whole(tmp_path / "pipe")
