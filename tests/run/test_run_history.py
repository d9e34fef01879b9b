"""The history of a run is read once, in an amount of memory that does not grow with it."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from drivetrain.cli.report.compare import page, read_run
from drivetrain.kernel.paths import place
from drivetrain.run import live_history, record_file, run_folder_writer
from drivetrain.run.live_history import LiveHistory
from drivetrain.run.record_schema import SYSTEM_FIGURES, fits, fitting
from drivetrain.run.run_folder_writer import RunFolderWriter
from drivetrain.run.run_history import FIGURES, HistoryFile, RunHistory

STARTED = {"event": "run_started", "first_step": 0, "num_parameters": 7, "total_steps": 10**9}
STARTED |= {"backend": "cpu", "world": {"size": 1}, "settings": {}}
MOST = 2003
"""Most points of a curve, at any time."""


def logged(step: int, loss: float | None = 1.0) -> dict[str, Any]:
    figures = dict.fromkeys(FIGURES, 0.5)
    return {"event": "logged", "step": step, "item_name": "samples", **figures, "loss": loss}


def evaluated(step: int, name: str = "held_out", loss: float = 1.0) -> dict[str, Any]:
    return {"event": "evaluated", "step": step, "name": name, "metrics": {"loss": loss}}


def ended(step: int) -> dict[str, Any]:
    return {"event": "run_ended", "step": step, "reason": "finished", "seconds": 1.0}


def write(path: Path, *records: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of bytes of each read of a file of records."""
    found: list[int] = []
    real = record_file.RecordFile._records

    def counting(self: Any, lines: bytes) -> Any:
        found.append(len(lines))
        return real(self, lines)

    monkeypatch.setattr(record_file.RecordFile, "_records", counting)
    return found


def test_a_long_curve_has_few_points_and_all_its_spikes() -> None:
    history = RunHistory()
    spikes = {7: 1e6, 50_001: -5.0, 99_999: 2e6}
    for first in range(1, 100_001, 500):
        steps = range(first, first + 500)
        history.add([logged(step, spikes.get(step, 1 + step % 10)) for step in steps])
        assert len(history.figures("loss")) <= MOST
    points = history.figures("loss")
    assert spikes.items() <= dict(points).items()
    assert [step for step, _ in points] == sorted(step for step, _ in points)
    for part in range(10):  # as many of each part of the run
        assert sum(part < step / 10_000 <= part + 1 for step, _ in points) > 50


def test_a_short_curve_is_whole_and_gaps_stay() -> None:
    few = [logged(step, None if step == 40 else step / 7) for step in range(1, 900)]
    points = RunHistory.of(few).figures("loss")
    assert points == [(record["step"], record["loss"]) for record in few]
    many = [logged(step, None if 5000 <= step < 6000 else 1.0) for step in range(1, 20_000)]
    gaps = [step for step, loss in RunHistory.of(many).figures("loss") if loss is None]
    assert gaps and all(5000 <= step < 6000 for step in gaps)


def test_steps_that_a_resumed_run_did_not_keep_are_left_out() -> None:
    history = RunHistory.of(
        [
            STARTED,
            *(logged(step) for step in range(1, 9)),
            evaluated(8),
            ended(8),
            {**STARTED, "first_step": 4},
            logged(5, 2.0),
        ]
    )
    steps = [(1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0), (5, 2.0)]
    assert history.figures("loss") == steps
    assert (history.ended, [*history.rows]) == (None, [])


def test_evaluations_stand_by_step_and_the_last_of_each_counts() -> None:
    """Measure steps again, as `drivetrain evaluate RUN --all` does."""
    history = RunHistory.of([evaluated(step, loss=float(step)) for step in (2, 4, 6, 8)])
    history.add([evaluated(8, "other"), *(evaluated(step, loss=step / 2) for step in (2, 3, 6, 8))])
    history.add([evaluated(1)])
    curves = {data: points for data, _, points in history.evaluated()}
    assert curves["held_out"] == [(1, 1.0), (2, 1.0), (3, 1.5), (4, 4.0), (6, 3.0), (8, 4.0)]
    rows = [(row["step"], row["name"], row["metrics"]["loss"]) for row in history.rows]
    assert [row for row in rows if row[1] == "held_out"] == [
        (step, "held_out", loss) for step, loss in curves["held_out"]
    ]
    assert "<dt>held_out: loss</dt><dd>4</dd>" in page([read_of(history)]), "of the last step"


def test_a_long_curve_that_is_measured_again_stays_sorted_and_bounded() -> None:
    steps = range(1, 6001)
    history = RunHistory.of([evaluated(step, loss=1.0) for step in steps])
    history.add([evaluated(step, loss=0.25 if step == 77 else 2.0) for step in steps])
    ((_, _, points),) = history.evaluated()
    seen = [step for step, _ in points]
    assert seen == sorted(set(seen)) and len(seen) <= MOST
    assert min(points, key=lambda point: point[1] or 0) == (77, 0.25)
    assert len(history.rows) == 500 and history.rows[-1]["step"] == 6000


def test_names_and_rows_without_end_are_bounded() -> None:
    history = RunHistory.of([evaluated(step, f"data {step}") for step in range(5000)])
    assert len(list(history.evaluated())) <= 200 and len(history.rows) <= 500
    assert history.left_out > 4000
    assert len(page([read_of(history)])) < 300_000


def read_of(history: RunHistory) -> Any:
    from drivetrain.cli.report.compare import RunRecords
    from drivetrain.run.shown_config import ShownConfig

    return RunRecords("a", history, ShownConfig())


# --- files --------------------------------------------------------------------------------------


def test_a_file_is_read_once_in_little_memory(tmp_path: Path, bytes_read: list[int]) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, STARTED, *(logged(step) for step in range(1, 60_000)))
    size = path.stat().st_size
    tracemalloc.start()
    file = HistoryFile(path)
    assert file.read().logged == logged(59_999)
    assert tracemalloc.get_traced_memory()[1] < min(3_000_000, size // 2)
    tracemalloc.stop()
    assert size - 1000 <= sum(bytes_read) <= size
    bytes_read.clear()
    assert file.read().logged == logged(59_999)
    assert not bytes_read
    write(path, logged(60_000))
    assert file.read().logged == logged(60_000)
    assert sum(bytes_read) == path.stat().st_size - size - 1


def test_a_line_that_is_being_written_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    line = json.dumps(logged(1))
    path.write_text(line[:20])
    file = HistoryFile(path)
    assert file.read().logged is None
    with path.open("a") as opened:
        opened.write(line[20:] + "\n")
    assert file.read().logged == logged(1)
    assert file.read().skipped == 0


@pytest.mark.parametrize("act", ["truncated", "replaced"])
def test_another_file_is_read_from_its_start(act: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, STARTED, logged(1), logged(2))
    file = HistoryFile(path)
    file.read()
    if act == "replaced":
        path.rename(tmp_path / "kept")  # so that its number is not given again
        write(path, logged(5), logged(6), logged(7), logged(8))
    else:
        path.write_text("")
        write(path, logged(5))
    assert file.read().figures("loss")[0] == (5, 1.0)


@pytest.mark.parametrize("length", [1000, 20_000, 2_000_000, 5_000_000])
def test_a_long_line_is_skipped_in_little_memory(length: int, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, logged(1))
    with path.open("a") as opened:
        opened.write("x" * length + "\n")
    write(path, logged(2))
    tracemalloc.start()
    history = HistoryFile(path).read()
    assert tracemalloc.get_traced_memory()[1] < 6_000_000
    tracemalloc.stop()
    assert history.figures("loss") == [(1, 1.0), (2, 1.0)]
    assert history.skipped == 1


def test_a_pipe_is_no_file_of_records(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/zero")
    with pytest.raises(OSError, match="regular file"):
        HistoryFile(tmp_path / "metrics.jsonl").read()


# --- a run that is under way --------------------------------------------------------------------


def writer(folder: Path, **config: Any) -> RunFolderWriter:
    return RunFolderWriter(place(str(folder)), config, lambda started, reason: "")


def test_evaluations_of_a_run_read_nothing_again(tmp_path: Path, bytes_read: list[int]) -> None:
    """Require that evaluations read no record again, and draw a limited number of points."""
    write(tmp_path / "metrics.jsonl", STARTED, *(logged(step) for step in range(1, 5001)))
    size = (tmp_path / "metrics.jsonl").stat().st_size
    made = writer(tmp_path)
    made.sink({**STARTED, "first_step": 5000})
    assert made.history is not None
    made.history.wait()
    for number in range(20):
        made.sink(logged(5001 + number, 7.0))
        made.sink(evaluated(5001 + number))
        text = (tmp_path / "report.html").read_text()
        assert f"running: step {5001 + number}" in text and len(text) < 100_000
    made.sink(ended(5021))
    assert sum(bytes_read) < size
    assert "finished at step 5021" in (tmp_path / "report.html").read_text()


def test_a_training_does_not_wait_for_its_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Require that evaluations draw no page while the file is read. The end of the run waits for
    it.
    """
    monkeypatch.setattr(live_history, "_PAUSE", 1e6)
    write(tmp_path / "metrics.jsonl", STARTED, *(logged(step) for step in range(1, 1001)))
    drawn: list[str] = []
    real: Callable[..., str] = run_folder_writer.render

    def render(*given: Any) -> str:
        drawn.append("page")
        return real(*given)

    monkeypatch.setattr(run_folder_writer, "render", render)
    made = writer(tmp_path)
    made.sink({**STARTED, "first_step": 1000})
    made.sink(evaluated(1001))
    assert not drawn
    made.sink(ended(1001))
    text = (tmp_path / "report.html").read_text()
    assert "finished at step 1001" in text and "held_out" in text
    assert len(LiveHistory(tmp_path / "metrics.jsonl").wait().figures("loss")) == 1000


HOSTILE_LINES = (
    '{"event": "run_ended", "step": 3, "reason": "x", "seconds": 1e300}',
    '{"event": "run_ended", "step": 3, "seconds": 1.0}',
    '{"event": "run_started", "first_step": 1' + "0" * 400 + ', "num_parameters": 7}',
    json.dumps({**logged(3), "mfu": "x"}),
    json.dumps({**logged(3), "step": 10**400}),
    json.dumps({**logged(3), "loss": 10**308}),
    '{"event": "logged", "step": 1}',
    "[" * 100_000,
)
HOSTILE_CONFIG = {
    "backend": None,
    "world_size": "x",
    "command": 5,
    "settings": {"a": 5, "b": {"value": 1, "source": "file"}, "c": {"source": "file"}},
    "name": ["x"],
    "torch": 7,
    "given": None,
    "track": None,
}


def test_a_stranger_s_run_is_shown_and_resumed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join([*HOSTILE_LINES, ""]))
    write(path, STARTED, logged(1))
    (tmp_path / "config.json").write_text(json.dumps(HOSTILE_CONFIG))
    run = read_run(tmp_path)
    assert (run.history.skipped, run.config.skipped) == (len(HOSTILE_LINES), 6)
    for text in (page([run]), page([run, run])):
        assert "step 1" in text
    assert f"{len(HOSTILE_LINES)} lines of metrics.jsonl" in page([run])
    made = writer(tmp_path)
    for record in ({**STARTED, "first_step": 1}, logged(2), evaluated(2), ended(2)):
        made.sink(record)
    text = (tmp_path / "report.html").read_text()
    assert "finished at step 2" in text and f"{len(HOSTILE_LINES)} lines" in text
    for settings in (5, [1], "x"):
        (tmp_path / "config.json").write_text(json.dumps({"settings": settings}))
        assert read_run(tmp_path).config.skipped == 1


WRONG = [float("nan"), float("inf"), -float("inf"), 1e300, -1, 10**400, True, None, "x", "x" * 300]


def fitted(values: Sequence[Any]) -> list[Any]:
    return [record for group in fitting(values) for record in group.records]


def test_records_that_are_checked_together_are_checked_like_single_ones() -> None:
    """Put each wrong value into each field of one, or of all, of several logs that are alike."""
    whole = {**logged(1), **dict.fromkeys(SYSTEM_FIGURES, 2.0), "time": 3.0, "losses": {}}
    whole |= {"total_steps": 9, "parts": {"data": 0.1}}
    for name in whole:
        for wrong in (*WRONG, {}, {"x": 1.0}, {"x": "y"}, []):
            for changed in ({3}, {*range(6)}):
                records: list[Any] = [dict(whole, step=step) for step in range(6)]
                for number in changed:
                    records[number][name] = wrong
                expected = [id(record) for record in records if fits(record)]
                assert [id(record) for record in fitted(records)] == expected, (name, wrong)
    others: list[Any] = [None, 3, [], {}, {"event": 7}, {"event": "other"}, {"event": "other"}]
    assert fitted(others) == [record for record in others if fits(record)]
