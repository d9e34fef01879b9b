"""Files in a run folder are checked, and used as far as they have the form that a run writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drivetrain.kernel.errors import OutputError
from drivetrain.run.record_file import read_records
from drivetrain.run.report import Outcome, render
from drivetrain.run.run_folder import read_config
from drivetrain.run.run_history import HistoryFile
from drivetrain.run.shown_config import ShownConfig

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
ENDED = {"event": "run_ended", "step": 3, "reason": "finished", "seconds": 1.0}
ODD = ["x", [1], {"a": 1}, 10**400]


def lines() -> list[str]:
    """Return lines of records in each of which one value has the wrong type."""
    found = ["[" * 100_000, "{", "7", "\x1b[2J", '{"event": 7}', '{"event": "logged"}']
    for record in (LOGGED, EVALUATED, STARTED, ENDED):
        for name in record.keys() - {"event"}:
            kind = type(record[name])
            odd = [value for value in ODD if kind is not type(value) or value == {"a": "x"}]
            found += [json.dumps({**record, name: value}) for value in odd]
    found += [json.dumps({**ENDED, "seconds": odd}) for odd in (1e300, -1e308)]
    found += [json.dumps({**LOGGED, "mfu": odd}) for odd in ("x", [1], 1e301)]
    found += [json.dumps({**LOGGED, "process_bytes": odd}) for odd in ("x", [1], 1e301)]
    found += [json.dumps({**LOGGED, "time": odd}) for odd in ("x", [1], 1e301)]
    found += [json.dumps({**LOGGED, "losses": odd}) for odd in ("x", {"a": "x"})]
    found += [json.dumps({name: ENDED[name] for name in ENDED if name != "reason"})]
    found += ['{"event": "run_ended", "step": 3, "reason": "x", "seconds": 1e999}', "NaN"]
    return [*found, json.dumps({**EVALUATED, "metrics": {"loss": "x"}})]


def test_the_page_is_made_whatever_the_history_holds(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sound = [json.dumps(each) for each in (STARTED, LOGGED, EVALUATED)]
    path.write_text("\n".join([*lines(), *sound, ""]))
    history = HistoryFile(path).read()
    assert (history.started, history.logged, [*history.rows]) == (STARTED, LOGGED, [EVALUATED])
    assert history.skipped == len(lines())
    text = render(history, ShownConfig(), Outcome("continued"))
    assert "held_out" in text and f"{len(lines())} lines of metrics.jsonl" in text
    for line in lines():
        path.write_text(f"{line}\n")
        render(HistoryFile(path).read(), ShownConfig(), Outcome("continued"))


def test_half_a_character_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    named = {**EVALUATED, "name": "\ud800", "metrics": {"\ud800": 1.0, "\U0001f642": 2.0}}
    path.write_text(json.dumps(named) + "\n")
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
