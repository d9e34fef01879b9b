"""What lies in a run folder is looked at, and believed as far as it is what a run writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drivetrain.cli.records import history, read_records
from drivetrain.cli.report import Outcome, render
from drivetrain.cli.run_folder import read_config
from drivetrain.kernel.errors import OutputError

LOGGED: dict[str, Any] = {
    "event": "logged",
    "step": 3,
    "total_steps": 5,
    "loss": 0.5,
    "learning_rate": 0.1,
    "grad_norm": None,
    "items_per_second": 7.0,
    "item_name": "samples",
}
EVALUATED = {"event": "evaluated", "step": 3, "name": "held_out", "metrics": {"loss": 1.0}}
STARTED = {"event": "run_started", "first_step": 0, "num_parameters": 7}
ODD = ["x", [1], {"a": 1}, 10**400]


def lines() -> list[str]:
    """Of records in which one thing is another."""
    found = ["[" * 100_000, "{", "7", "\x1b[2J", '{"event": 7}', '{"event": "logged"}']
    for record in (LOGGED, EVALUATED, STARTED):
        for name in record.keys() - {"event"}:
            kind = type(record[name])
            odd = [value for value in ODD if kind is not type(value) or value == {"a": "x"}]
            found += [json.dumps({**record, name: value}) for value in odd]
    return [*found, json.dumps({**EVALUATED, "metrics": {"loss": "x"}})]


def test_the_page_is_made_whatever_the_history_holds(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sound = [json.dumps(each) for each in (STARTED, LOGGED, EVALUATED)]
    path.write_text("\n".join([*lines(), *sound]))
    records = history(read_records(path))
    assert [record for record in records if record in (STARTED, LOGGED, EVALUATED)] == [
        STARTED,
        LOGGED,
        EVALUATED,
    ]
    assert "held_out" in render(records, {}, Outcome("went on"))
    for line in lines():
        path.write_text(line)
        render(history(read_records(path)), {}, Outcome("went on"))


def test_half_a_character_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    named = {**EVALUATED, "name": "\ud800", "metrics": {"\ud800": 1.0, "\U0001f642": 2.0}}
    path.write_text(json.dumps(named))
    (record,) = read_records(path)
    assert record == {**named, "name": "?", "metrics": {"?": 1.0, "\U0001f642": 2.0}}


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "{",
        '{"recipe": 7}',
        '{"recipe": ["a"]}',
        '{"backend": {"a": 1}}',
        '{"given": [1]}',
        '{"given": "\\u001b[2J"}',
    ],
)
def test_a_configuration_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(OutputError, match=r"config\.json") as raised:
        read_config(tmp_path)
    assert str(raised.value).isprintable() and len(str(raised.value)) < 600
