"""Sound manifests, indexes and headers, altered at random in their structure: read or refused."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from . import fuzzed
from .fuzzed import SEEDS, TARGETS

ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 100),
    st.sampled_from([1 << 31, 1 << 62, 1 << 63, 1 << 64, -(1 << 63), 10**30]),
    st.floats(),
    st.sampled_from(["", "F32", "I8", "BOOL", "../x", "a\0", "weights", "flat", "box"]),
    st.just({"$float": "nan"}),
    st.lists(st.integers(-1, 9), max_size=4),
    st.dictionaries(st.sampled_from(["name", "shape", "flat", "box"]), st.integers(0, 9)),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Yield the paths to all values in a JSON value."""
    if not isinstance(value, dict | list):
        return [path]
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    return [path, *(found for key, item in inside for found in places(item, (*path, key)))]


@st.composite
def altered(draw: st.DrawFn, value: Any) -> Any:
    """Draw the value with a few values in it replaced, deleted, doubled, renamed or exchanged."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 4))):
        paths = [path for path in places(value) if path]
        if not paths:
            break
        *outer, last = draw(st.sampled_from(paths))
        inner = value
        for key in outer:
            inner = inner[key]
        match draw(st.sampled_from(["replace", "delete", "double", "move", "count"])):
            case "replace":
                inner[last] = copy.deepcopy(draw(ODD))
            case "delete":
                del inner[last]
            case "double" if isinstance(inner, list):
                inner.insert(last, copy.deepcopy(inner[last]))
            case "double" | "move" if isinstance(inner, dict):
                name = draw(st.sampled_from(["x", "", "w#0", "__metadata__", *inner]))
                inner[name] = copy.deepcopy(inner[last])
            case "count" if type(inner[last]) is int:
                inner[last] += draw(st.integers(-3, 3))
    return value


def parts_of(raw: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the header of a shard, and the bytes after it."""
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def joined(header: Any, rest: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + rest


@st.composite
def shards(draw: st.DrawFn) -> bytes:
    header, rest = parts_of(SEEDS["shard"]())
    if draw(st.booleans()):
        labels = json.loads(header["__metadata__"]["drivetrain"])
        header["__metadata__"]["drivetrain"] = json.dumps(draw(altered(labels)))
    else:
        header = draw(altered(header))
    return joined(header, draw(st.sampled_from([rest, rest[:-1], rest + b"\0", b""])))


TEXTS: dict[str, st.SearchStrategy[bytes]] = {
    "manifest": altered(json.loads(SEEDS["manifest"]())).map(lambda v: json.dumps(v).encode()),
    "index": altered(json.loads(SEEDS["index"]())).map(lambda v: json.dumps(v).encode()),
    "shard": shards(),
}


def try_out(name: str, num_examples: int) -> None:
    @settings(max_examples=num_examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(TEXTS[name])
    def act(raw: bytes) -> None:
        TARGETS[name](raw)

    act()


@pytest.mark.parametrize("name", TARGETS)
def test_what_they_are_altered_from_is_taken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Require that the unaltered seeds are accepted. Otherwise all altered ones would be refused at
    once.
    """
    monkeypatch.setattr(fuzzed, "CheckpointDamaged", KeyboardInterrupt)  # is not caught any more
    TARGETS[name](SEEDS[name]())


@pytest.mark.parametrize("name", TARGETS)
def test_altered_structure_is_read_or_refused(name: str) -> None:
    try_out(name, 150)


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_altered_structure_is_read_or_refused_many_times(name: str) -> None:
    try_out(name, 3_000)


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_altered_bytes_are_read_or_refused(name: str) -> None:
    dice, sound = random.Random(0), SEEDS[name]()
    for _ in range(10_000):
        raw = bytearray(sound)
        for _ in range(dice.randint(1, 8)):
            raw[dice.randrange(len(raw))] = dice.randrange(256)
        TARGETS[name](bytes(raw[: dice.randint(0, 2 * len(raw))]))
