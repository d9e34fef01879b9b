"""The manifest is read as it was written, and a hostile one is refused with a clear message."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.checkpoint import Manifest, read_manifest
from drivetrain.checkpoint.manifest import FileEntry, write_manifest
from drivetrain.kernel.errors import CheckpointDamaged, CheckpointNotFound

FILE = FileEntry("weights-00000-of-00001.safetensors", 10, 2**32 - 1)
names = st.text(max_size=5).filter(lambda text: not text.startswith("$"))
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
values = st.recursive(scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(names, v))


def same(a, b):
    """Return True for equal values. Unlike ==, 1 differs from 1.0 and True, and 0.0 from -0.0; NaN
    equals NaN.
    """
    return (
        repr(a) == repr(b)
        if not isinstance(a, dict)
        else (a.keys() == b.keys() and all(same(a[key], b[key]) for key in a))
    )


def ordered(value):
    if isinstance(value, dict):
        return {key: ordered(value[key]) for key in sorted(value)}
    return [ordered(item) for item in value] if isinstance(value, list) else value


@given(st.dictionaries(names, values, max_size=4), st.integers(0, 10**12))
def test_round_trip(state, step):
    manifest = Manifest(step, (FILE,), state, {"lr": 0.1}, "some", 4, (("a", "b"),))
    raw = manifest.to_bytes()
    read = Manifest.from_bytes(raw, "here")
    assert same(ordered(read.state), ordered(state))
    assert (read.step, read.files, read.tied) == (step, (FILE,), (("a", "b"),))
    assert read.to_bytes() == raw


def test_non_finite_numbers_come_back(tmp_path):
    write_manifest(tmp_path, Manifest(1, (), {"loss": math.nan, "best": [math.inf, -math.inf]}))
    state = read_manifest(tmp_path).state
    assert math.isnan(state["loss"])
    assert state["best"] == [math.inf, -math.inf]
    strict = json.loads((tmp_path / "manifest.json").read_bytes(), parse_constant=pytest.fail)
    assert strict["state"]["loss"] == {"$float": "nan"}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": [1, {"b": object()}]}, r"\['a'\]\[1\]\['b'\] is a object"),
        ({"a": Path()}, "Path"),
        ({1: 2}, "key 1"),
        ({"$float": "nan"}, "do not start"),
    ],
)
def test_what_json_would_change_is_refused(state, message):
    with pytest.raises(TypeError, match=message):
        Manifest(1, (), state).to_bytes()


def document(**changes):
    return json.loads(Manifest(1, (FILE,)).to_bytes()) | changes


def entry(**changes):
    return {"files": [{"name": FILE.name, "num_bytes": 10, "crc32": 5} | changes]}


HOSTILE_NAMES = [
    "", ".", "..", "/etc/passwd", "../weights-00000-of-00001.safetensors", "a/b.safetensors",
    "weights-00000-of-00001.safetensors/", "weights-00000-of-00001.safetensors\n",
    "weights-00000-of-00001.safetensors\0", "WEIGHTS-00000-of-00001.safetensors",
    "weights-\u0660\u0660\u0660\u0660\u0660-of-00001.safetensors",
    "manifest.json", "model.bin", 7, None,
]  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        *(entry(name=name) for name in HOSTILE_NAMES),
        entry(num_bytes=-1), entry(num_bytes=True), entry(num_bytes=1.0), entry(crc32="5"),
        entry(more=1), {"files": [7]}, {"files": {}}, {"files": None},
        {"files": entry()["files"] * 2},
        {"step": -1}, {"step": "1"}, {"step": True}, {"step": 1.0}, {"world_size": None},
        {"driver": 1}, {"state": []}, {"settings": "x"}, {"more": 1},
        {"tied": [[]]}, {"tied": [["a", 1]]}, {"tied": ["ab"]}, {"tied": 3},
        {"format": "other"}, {"format": None}, {"version": 2}, {"version": "1"}, {"version": None},
    ],
    ids=repr,
)  # fmt: skip
def test_hostile_values(changes):
    with pytest.raises(CheckpointDamaged, match=r"^here: "):
        Manifest.from_bytes(json.dumps(document(**changes)).encode(), "here")


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"[]", b"7", b"null", b'"x"', b"\xff\xfe{}", b'{"$float": "nan"}',
        b'{"$float": {}}', b'{"a": 1, "a": 1}', b'{"a": NaN}', b'{"a": -Infinity}',
        b'{"a": 1e999}', b'{"a": ' + b"1" * 5000 + b"}", b"[" * 100_000,
        b'{"a": ' * 70 + b"1" + b"}" * 70, b"{} {}", b"\xef\xbb\xbf{}",
    ],
    ids=lambda raw: repr(raw[:20]),
)  # fmt: skip
def test_hostile_json(raw):
    with pytest.raises(CheckpointDamaged, match=r"^here: "):
        Manifest.from_bytes(raw, "here")


@pytest.mark.parametrize("text", ["[" * 100, "}" * 100, '"[' * 100, "\\" * 3, '\\"[' * 100])
def test_brackets_in_texts_are_no_nesting(text):
    state = {"a": text, text: [text, {text: text}]}
    assert Manifest.from_bytes(Manifest(1, (), state).to_bytes(), "here").state == state


@pytest.mark.parametrize("text", ["", "[]", '"', "\\", '\\"'])
def test_nesting_after_brackets_in_texts_is_seen(text):
    def nested(depth):
        value = 1
        for _ in range(depth):
            value = [f"{text}]", value, f"{text}["]
        return {"a": value}

    assert Manifest.from_bytes(Manifest(1, (), nested(60)).to_bytes(), "here").state == nested(60)
    with pytest.raises(CheckpointDamaged, match="nested deeper than 64"):
        Manifest.from_bytes(Manifest(1, (), nested(63)).to_bytes(), "here")


def test_any_missing_key():
    for key in document():
        raw = document()
        del raw[key]
        with pytest.raises(CheckpointDamaged, match=r"^here: "):
            Manifest.from_bytes(json.dumps(raw).encode(), "here")


@given(st.data())
def test_any_altered_byte_is_refused_or_read(data):
    raw = bytearray(Manifest(1, (FILE,), {"a": 1.5}).to_bytes())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(CheckpointDamaged):
        Manifest.from_bytes(bytes(raw), "here")


def test_a_newer_version_comes_with_advice():
    with pytest.raises(CheckpointDamaged, match=r"format version 2.*install"):
        Manifest.from_bytes(json.dumps(document(version=2)).encode(), "here")


def test_where_there_is_none(tmp_path):
    with pytest.raises(CheckpointNotFound, match="no such checkpoint"):
        read_manifest(tmp_path / "none")
    with pytest.raises(CheckpointDamaged, match="never completed"):
        read_manifest(tmp_path)
    (tmp_path / "elsewhere").write_bytes(Manifest(1, ()).to_bytes())
    (tmp_path / "manifest.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointDamaged, match="cannot be opened"):
        read_manifest(tmp_path)


def test_a_huge_manifest_is_refused_unread(tmp_path):
    with open(tmp_path / "manifest.json", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CheckpointDamaged, match="larger than"):
        read_manifest(tmp_path)
