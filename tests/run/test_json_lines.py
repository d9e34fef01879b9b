"""Lines are parsed exactly as by the standard library's json, also those that orjson refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.cli.report.compare import page, read_run
from drivetrain.run.json_lines import parsed

LONG = [1 << power for power in (53, 62, 63, 64, 65, 200)]
numbers = st.one_of(
    st.floats(),
    st.integers(),
    st.sampled_from(LONG).flatmap(lambda near: st.integers(near - 2, near + 2)),
    st.sampled_from(LONG).flatmap(lambda near: st.integers(-near - 2, -near + 2)),
)
texts = st.text(st.characters(codec=None), max_size=8)  # lone surrogates, too
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=8,
)
HOSTILE = [
    '{"a": 1, "b": 2, "a": 3}',
    '{"a": 1e400, "b": -1e400, "c": 1e-400, "d": -0, "e": -0.0}',
    '{"a": 0.00012345678901234567, "b": 12345678901234567890.5, "c": 1e00000000000000000002}',
    '{"a": NaN, "b": [Infinity, -Infinity]}',
    f"[{1 << 64},{-(1 << 63) - 1}]",
    f'{{"a":{1 << 64}}}',
    f"{1 << 64}",
    "1" * 5000,
    '"\\ud83d\\ude00 \\ud800"',
    '{"a": 1}, {"b": 2}',
    '{"a": [1',
    "2]}",
    "",
    " \t\r",
    "\x0b",
    "\ufeff{}",
    '"\x00"',
    '{"a": 01}',
    "[1,]",
    "nan",
]


def plainly(text: str) -> list[Any]:
    """Parse line by line with json alone."""
    found = []
    for line in text.split("\n"):
        try:
            value = json.loads(line)
            found.append(json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace")))
        except (ValueError, RecursionError):
            continue
    return found


@settings(max_examples=100, deadline=None, database=None)
@given(st.lists(values, min_size=1, max_size=4), st.booleans())
def test_lines_are_parsed_as_json_parses_them(found: list[Any], escaped: bool) -> None:
    lines = [json.dumps(value, ensure_ascii=escaped) for value in found]
    raw = "\n".join(lines).encode(errors="replace")
    values, num_lines = parsed(raw)
    assert repr(values) == repr(plainly(raw.decode())), "types, order and signs of zero, too"
    assert num_lines == len(lines)


@pytest.mark.parametrize("line", HOSTILE)
def test_a_hostile_line_is_parsed_or_skipped_as_by_json(line: str) -> None:
    for lines in ([line], ['{"event": "logged"}', line, '{"step": 1}']):
        raw = "\n".join(lines).encode()
        assert repr(parsed(raw)[0]) == repr(plainly(raw.decode()))
        assert parsed(raw)[1] == sum(bool(each.strip()) for each in lines)


def test_text_that_is_not_utf_8_is_replaced() -> None:
    assert parsed(b'{"a": "\xff"}\n{"b": "\xed\xa0\x80"}\n1') == (
        [{"a": "\ufffd"}, {"b": "\ufffd" * 3}, 1],
        3,
    )


@pytest.mark.parametrize("depth", [500, 960, 1000, 1022, 1100, 100_000])
def test_deep_nesting_is_shown_or_skipped(depth: int, tmp_path: Path) -> None:
    """Neighbours that are alike are compared; their nested values must not be."""
    deep = "[" * depth + "]" * depth
    started = f'{{"event": "run_started", "num_parameters": 7, "settings": {deep}}}\n'
    unknown = f'{{"event": {deep}, "step": 1}}\n'
    logged = '{"event": "logged", "step": 4, "loss": 1, "learning_rate": 1, "grad_norm": 1, '
    logged += f'"items_per_second": 1, "item_name": "samples", "more": {deep}}}\n'
    last = '{"event": "run_ended", "step": 4, "reason": "finished", "seconds": 1.0}\n'
    (tmp_path / "metrics.jsonl").write_text(2 * started + 2 * unknown + 2 * logged + last)
    (tmp_path / "config.json").write_text("{}")
    assert "finished at step 4" in page([read_run(tmp_path)])
